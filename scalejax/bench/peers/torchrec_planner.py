"""TorchRec's planner on the tables, the machine and the column width that ours gets, and its cost of any plan.

TorchRec plans for "cuda" devices without one being there: tables lie on the meta device. What is held equal:
  - rates and memory of the machine, batch size, pooling factors, least width of a column slice (its default of 128
    would keep it from cutting any of these tables);
  - tables stay in device memory (kernels "fused", and "dense" for data-parallel ones), nothing is reserved.
Everything else is as TorchRec has it: its proposers, partitioner, estimators.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.planner import HostTopology as Machine
from scalejax.parallel.planner import TableStatistics

_SHARDERS = [EmbeddingBagCollectionSharder()]


class Planner:
    """TorchRec's planner for one set of tables.

    Args:
      tables: The tables, all pooled.
      statistics: One entry for each, in their order.
      machine: The machine.
      batch_size: Examples of the global batch.
      min_slice_width: Least width of a column slice.
      timeout_s: Seconds after which it starts no further proposal (its own option); None = never.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        statistics: Sequence[TableStatistics],
        machine: Machine,
        batch_size: int,
        min_slice_width: int,
        timeout_s: int | None,
    ) -> None:
        logging.getLogger("torchrec").setLevel(logging.ERROR)
        logging.getLogger().setLevel(logging.ERROR)  # it logs a line for every table there
        self._tables = {table.name: table for table in tables}
        self._pooling = {entry.table: list(entry.pooling_factors) for entry in statistics}
        self._local_batch = batch_size // machine.devices
        self._width, self._timeout = min_slice_width, timeout_s
        self._devices = machine.devices
        self._topology = Topology(
            world_size=machine.devices,
            local_world_size=machine.devices_per_host,
            compute_device="cuda",
            hbm_cap=machine.memory_bytes,
            hbm_mem_bw=machine.memory_bandwidth / 1000,  # bytes/ms
            intra_host_bw=machine.intra_host_bandwidth / 1000,
            inter_host_bw=machine.inter_host_bandwidth / 1000,
        )
        self._module = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=list(table.features),
                )
                for table in tables
            ],
        )

    def plan(self) -> ShardingPlan:
        """A plan in our terms."""
        constraints = {
            name: ParameterConstraints(
                min_partition=self._width, pooling_factors=pooling, compute_kernels=["fused", "dense"]
            )
            for name, pooling in self._pooling.items()
        }
        planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=self._local_batch,
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            debug=False,
            timeout_seconds=self._timeout,
        )
        found = planner.plan(self._module, _SHARDERS).plan[""]
        return ShardingPlan(tables=tuple(self._entry(name, sharding) for name, sharding in found.items()))

    def milliseconds(self, plan: ShardingPlan) -> np.ndarray:
        """float64[N]: what TorchRec's estimator says of every device under a plan."""
        entries: Mapping[str, TablePlan] = {entry.table: entry for entry in plan.tables}
        constraints = {
            name: ParameterConstraints(
                sharding_types=[entry.kind],
                compute_kernels=["dense" if entry.kind == "data_parallel" else "fused"],
                min_partition=self._tables[name].dim // entry.columns,
                pooling_factors=self._pooling[name],
            )
            for name, entry in entries.items()
        }
        enumerator = EmbeddingEnumerator(self._topology, batch_size=self._local_batch, constraints=constraints)
        total = np.zeros(self._devices)
        for option in enumerator.enumerate(self._module, _SHARDERS):
            entry = entries[option.name]
            owners = entry.ranks or tuple(range(self._devices))
            if len(option.shards) != len(owners):
                raise ValueError(f"{option.name}: TorchRec has {len(option.shards)} shards, the plan {len(owners)}.")
            for shard, owner in zip(option.shards, owners, strict=True):
                total[owner] += shard.perf.total
        return total

    def _entry(self, name: str, sharding: object) -> TablePlan:
        kind, ranks = sharding.sharding_type, tuple(sharding.ranks)  # pyright: ignore[reportAttributeAccessIssue]
        columns = 1
        if kind in ("column_wise", "table_column_wise"):
            columns = len(ranks)
        elif kind == "grid_shard":
            columns = len(ranks) // self._topology.local_world_size
        if kind == "data_parallel" or (kind == "row_wise" and len(ranks) == self._devices):
            ranks = None
        kind = "grid" if kind == "grid_shard" else kind
        if kind in ("column_wise", "table_column_wise") and columns == 1:
            kind = "table_wise"
        return TablePlan(table=name, kind=kind, ranks=ranks, columns=columns)
