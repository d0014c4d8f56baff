"""GraphSAGE (Hamilton et al., NeurIPS 2017).

scalejax train graphsage
"""

import dataclasses

from scalejax import optim
from scalejax.configs.graph import _common
from scalejax.data.graphs import NodeData
from scalejax.models.graph import GraphSageConfig
from scalejax.train.experiment import Experiment


def cora() -> Experiment:
    """Two layers with the mean aggregator on the bundled Cora, in mini-batches with 10 and then 10 neighbours."""
    return _common.experiment(
        model=GraphSageConfig(hidden=64, dropout=0.5),
        data=NodeData(self_loops="keep", normalization="none", fanouts=(10, 10), batch_size=64),
        steps=200,
        optimizer=optim.AdamL2(learning_rate=optim.Constant(value=0.01), l2=5e-4),
        eval_every=10,
    )


def smoke() -> Experiment:
    """A few steps of a narrow GraphSAGE."""
    small = NodeData(self_loops="keep", normalization="none", fanouts=(3, 2), batch_size=16)
    return dataclasses.replace(
        cora(), model=GraphSageConfig(hidden=4), data=small, steps=12, log_every=4, evaluation=_common.scored(every=4)
    )
