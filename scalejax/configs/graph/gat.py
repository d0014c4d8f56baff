"""GAT (Velickovic et al., ICLR 2018).

scalejax train gat
"""

import dataclasses

from scalejax import optim
from scalejax.configs.graph import _common
from scalejax.data.graphs import NodeData
from scalejax.models.graph import GatConfig
from scalejax.train.experiment import Experiment


def cora() -> Experiment:
    """The two-layer GAT of the paper, 8 heads of width 8, on the bundled Cora."""
    return _common.experiment(
        model=GatConfig(),
        data=NodeData(normalization="none"),
        steps=200,
        optimizer=optim.AdamL2(learning_rate=optim.Constant(value=0.005), l2=5e-4),
    )


def smoke() -> Experiment:
    """A few epochs of a narrow GAT."""
    return dataclasses.replace(
        cora(), model=GatConfig(hidden=2, heads=2), steps=12, log_every=4, evaluation=_common.scored(every=4)
    )
