"""Graphs on the host: reading, generating, normalising, and sampling neighbours. Nothing here imports jax."""

from scalejax.data.graphs.adjacency import Adjacency as Adjacency
from scalejax.data.graphs.dataset import GraphSchema as GraphSchema
from scalejax.data.graphs.dataset import NodeBatch as NodeBatch
from scalejax.data.graphs.dataset import NodeData as NodeData
from scalejax.data.graphs.dataset import NodeDataSet as NodeDataSet
from scalejax.data.graphs.edge_list import read_edge_list as read_edge_list
from scalejax.data.graphs.edge_list import read_edge_parquet as read_edge_parquet
from scalejax.data.graphs.from_libraries import from_pyg as from_pyg
from scalejax.data.graphs.from_libraries import from_scipy as from_scipy
from scalejax.data.graphs.generate import knn as knn
from scalejax.data.graphs.generate import power_law as power_law
from scalejax.data.graphs.generate import rmat as rmat
from scalejax.data.graphs.graph import NodeGraph as NodeGraph
from scalejax.data.graphs.graph import row_normalized as row_normalized
from scalejax.data.graphs.neighbors import Hop as Hop
from scalejax.data.graphs.neighbors import Neighborhood as Neighborhood
from scalejax.data.graphs.neighbors import NeighborSampler as NeighborSampler
from scalejax.data.graphs.npz import read_npz as read_npz
from scalejax.data.graphs.npz import write_npz as write_npz
from scalejax.data.graphs.ogb import read_ogb as read_ogb
from scalejax.data.graphs.planetoid import read_planetoid as read_planetoid
