"""GCN (Kipf and Welling, ICLR 2017).

scalejax train gcn
"""

import dataclasses

from scalejax import optim
from scalejax.configs.graph import _common
from scalejax.data.graphs import NodeData
from scalejax.models.graph import GcnConfig
from scalejax.train.experiment import Experiment


def cora() -> Experiment:
    """The two-layer GCN of the paper on the bundled Cora; test accuracy 0.81 to 0.83 in 200 epochs."""
    return _common.experiment(
        model=GcnConfig(hidden=16, dropout=0.5),
        data=NodeData(normalization="symmetric"),
        steps=200,
        optimizer=optim.AdamL2(learning_rate=optim.Constant(value=0.01), l2=5e-4, only="layers/0/"),
    )


def citeseer() -> Experiment:
    """The same on Citeseer, which you bring as an npz: set data.path."""
    return dataclasses.replace(cora(), data=NodeData(path="citeseer.npz", normalization="symmetric"))


def proteins() -> Experiment:
    """Three layers of 256 on ogbn-proteins (112 tasks), which you bring as OGB unpacks it: set data.path.

    OGB's own GCN of these sizes has a test AUC of 0.7251 +- 0.0035 after 1,000 epochs (arXiv 2005.00687); nobody has
    run this one.
    """
    return _common.experiment(
        model=GcnConfig(layers=3, hidden=256, dropout=0.0),
        data=NodeData(
            path="ogbn_proteins", format="ogb", ogb_edges="both-ways", normalization="symmetric", features="as-is"
        ),
        steps=1000,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=0.01)),
        eval_every=5,
    )


def smoke() -> Experiment:
    """A few epochs of a narrow GCN."""
    return dataclasses.replace(
        cora(), model=GcnConfig(hidden=4), steps=12, log_every=4, evaluation=_common.scored(every=4)
    )
