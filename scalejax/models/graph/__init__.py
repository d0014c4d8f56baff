"""Graph networks: GCN, GraphSAGE and GAT, over whole graphs, sampled graphs and sampled neighbourhoods.

    graph = of_host(adjacency)                          every edge
    graph = presampled(adjacency, Sampling(width=16))   at most 16 edges a node, drawn once
    logits = model(features, graph)                     of every node; the same parameters read any of these

`NodeTask` binds a model to a data set for `scalejax train`.
"""

from scalejax.models.graph.aggregation import Graph as Graph
from scalejax.models.graph.aggregation import Sampling as Sampling
from scalejax.models.graph.aggregation import graph_of as graph_of
from scalejax.models.graph.aggregation import of_hop as of_hop
from scalejax.models.graph.aggregation import of_host as of_host
from scalejax.models.graph.aggregation import presampled as presampled
from scalejax.models.graph.gat import GatConfig as GatConfig
from scalejax.models.graph.gat import GatLayer as GatLayer
from scalejax.models.graph.gcn import GcnConfig as GcnConfig
from scalejax.models.graph.gcn import GcnLayer as GcnLayer
from scalejax.models.graph.graphsage import GraphSageConfig as GraphSageConfig
from scalejax.models.graph.graphsage import SageLayer as SageLayer
from scalejax.models.graph.layers import Network as Network
from scalejax.models.graph.task import NodeTask as NodeTask
