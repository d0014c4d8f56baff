"""Small machines and tables that several files plan for, and the memory of a plan worked out in another way."""

from collections import defaultdict

from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.planner import HostTopology, Reuse, TableStatistics
from scalejax.parallel.planner.evaluation import works_of

STATE = {"Sgd": lambda d: 0, "RowwiseAdagrad": lambda d: 4, "Adagrad": lambda d: 4 * d}


def machine(devices=8, in_host=4, memory=2**34, **changes) -> HostTopology:
    fields = dict(
        devices=devices,
        devices_per_host=in_host,
        memory_bytes=memory,
        memory_bandwidth=1e12,
        intra_host_bandwidth=1e11,
        inter_host_bandwidth=1e10,
    )
    return HostTopology(**(fields | changes))


def table(name, rows, dim=32, pooling=1.0, reuse=2.0, **changes):
    """A table of one feature, and its statistics."""
    config = TableConfig(name=name, rows=rows, dim=dim, features=(f"{name}_ids",), **changes)
    return config, TableStatistics(table=name, pooling_factors=(pooling,), popularity=Reuse(factor=reuse))


def memory_by_hand(plan, tables, statistics, topology, batch_size) -> list[int]:
    """Bytes of every device: arrays one by one, each as long as on the fullest device; float32 and bags only."""
    n = topology.devices
    arrays = defaultdict(lambda: [0] * n)  # (width, optimizer) -> rows of every device
    buffers, everywhere = [0.0] * n, 0.0
    works = works_of(tables, statistics, batch_size)
    by_name = {t.name: t for t in tables}
    for entry in plan.tables:
        config, ids = by_name[entry.table], works[entry.table].occurrences
        vectors = batch_size * len(config.features)
        everywhere += 8 * config.dim * vectors / n
        width = config.dim // entry.columns
        if entry.kind == "data_parallel":
            everywhere += config.rows * (4 * width + STATE[type(config.optimizer).__name__](width))
            everywhere += ids * (4 + 8 * width)
            continue
        owners = entry.ranks or tuple(range(n))
        parts = len(owners) // entry.columns
        by_rows = entry.kind in ("row_wise", "table_row_wise", "grid")
        if by_rows:
            everywhere += 2 * 8 * config.dim * ids / n
        for owner in owners:
            arrays[width, config.optimizer][owner] += -(-config.rows // parts)
            carried = ids / parts if by_rows else vectors
            buffers[owner] += 2 * (4 * ids / parts + 8 * width * carried) + 4 * width * ids / parts
    held = sum(max(rows) * (4 * width + STATE[type(o).__name__](width)) for (width, o), rows in arrays.items())
    return [held + everywhere + max(buffers)] * n
