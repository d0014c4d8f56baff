"""What crosses between hosts in a step of a model over towers, as compiled, against the formula of DMT."""

import dataclasses
from collections import Counter

from scalejax import plan
from scalejax.parallel.planner import TableConstraints
from scalejax.plan import sharding
from scalejax.plan.arithmetic.tower_steps import two_level_bytes
from scalejax.plan.compiled.collectives import total
from scalejax.train.runs import binding


def by_towers(experiment, machine, *, route="two_level", kinds=None, mesh=None):
    """An experiment with the plan of its towers for a machine."""
    limits = tuple(TableConstraints(table=name, kinds=kinds) for name in experiment.data.schema().keys)
    found = sharding.shard(experiment, machine, mesh=mesh, constraints=limits).planned.plan
    exchange = dataclasses.replace(experiment.tables.exchange, route=route)
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, towers=found.partition),
        tables=dataclasses.replace(experiment.tables, sharding=found, exchange=exchange),
    )


def compiled_for(experiment, mesh):
    """The collectives of its step."""
    step, arguments = binding.bind(experiment, experiment.data.schema(), mesh, abstract=True).repeated_step()
    return plan.explain_sharding(step.trace(*arguments).lower().compile(), mesh)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Exchanges of vectors and ids.

    Attributes:
      payload: Bytes of the pooled vectors of the examples of a device. Blocks are of one size: every device counts as
        having as many whole tables, and every host as many striped ones, as the one with most.
      ids: Bytes of one number of 4 bytes for each id of a device.
      between, within: All-to-alls of each hop, of all executions.
    """

    payload: int
    ids: int
    between: plan.Collective
    within: plan.Collective

    @property
    def hosts(self):
        return self.between.group_size

    @property
    def in_host(self):
        return self.within.group_size


def read(collectives, experiment, hosts, in_host):
    """The traffic of a step in two hops; there are no other all-to-alls."""
    on_device = Counter(entry.ranks[0] for entry in experiment.tables.sharding.tables if len(entry.ranks) == 1)
    on_host = Counter(entry.ranks[0] // in_host for entry in experiment.tables.sharding.tables if len(entry.ranks) > 1)
    features = in_host * max(on_device.values(), default=0) + max(on_host.values(), default=0)
    ids = 4 * features * hosts * experiment.data.batch_size // (hosts * in_host)
    moved = {c.axes: c for c in total(collectives) if c.kind == "all-to-all"}
    assert set(moved) == {("replica",), ("fsdp",)}
    return Traffic(ids * experiment.model.table_dim, ids, moved["replica",], moved["fsdp",])


def check_between(found, planes, compression=1.0, itemsize=4):
    """Three exchanges, of ids, vectors and gradients, each group of which has one device of each host.

    Args:
      found: What was read.
      planes: Numbers of 4 bytes that travel with each id, itself included.
      compression: c, the ratio of what the modules between the hops get to what they give.
      itemsize: Bytes of a number of that.
    """
    payload = found.payload * itemsize / 4
    hop, _ = two_level_bytes(payload, found.hosts, found.in_host, compression)
    assert all(
        sorted(device // found.in_host for device in group) == [*range(found.hosts)] for group in found.between.groups
    )
    assert found.between.count == 3
    assert found.between.bytes == 2 * payload / compression + planes * found.ids
    assert found.between.minimum_bytes == 2 * hop.between + planes * found.ids * (found.hosts - 1) // found.hosts


def check_within(found, planes):
    """The same within hosts, where one device has all rows of a feature, or of a slice of its columns."""
    _, hop = two_level_bytes(found.payload, found.hosts, found.in_host)
    assert found.within.count == 3
    share = (found.in_host - 1) / found.in_host
    assert found.within.minimum_bytes == 2 * hop.within + planes * found.ids * share
