"""Tables, batches and literal NumPy oracles that several embedding tests share."""

import dataclasses

import jax
import numpy as np

from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.models.recsys.stack import Important, NarrowGroup
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.config import (
    Adagrad,
    Adam,
    Lamb,
    LarsSgd,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    Sgd,
    TableConfig,
)
from scalejax.parallel.embedding.ids import jagged
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan

SHARED_ROWS, BIG_ROWS, TINY_ROWS = 13, 1030, 3
"""None divides by 8; one has fewer rows than devices, one more than a granule of the stored form."""

SCHEMA = Schema(
    categorical=(
        Categorical(name="one", rows=SHARED_ROWS),
        Categorical(name="bag", rows=SHARED_ROWS, length=None, capacity=4),
        Categorical(name="fixed", rows=BIG_ROWS, length=2),
        Categorical(name="sequence", rows=TINY_ROWS, length=3),
        Categorical(name="mean_bag", rows=BIG_ROWS, length=None, capacity=4),
        Categorical(name="history", rows=TINY_ROWS, length=None, max_length=5, capacity=4),
    )
)


def tables_of(optimizer):
    """Two features on one table, fixed and jagged, sum, mean and none (of a fixed and of any length), two widths."""
    return (
        TableConfig(name="shared", rows=SHARED_ROWS, dim=4, features=("one", "bag"), optimizer=optimizer),
        TableConfig(name="big", rows=BIG_ROWS, dim=4, features=("fixed",), optimizer=optimizer),
        TableConfig(name="means", rows=BIG_ROWS, dim=4, features=("mean_bag",), pooling="mean", optimizer=optimizer),
        TableConfig(
            name="tiny", rows=TINY_ROWS, dim=3, features=("sequence", "history"), pooling="none", optimizer=optimizer
        ),
    )


OPTIMIZERS = {
    "sgd": Sgd(learning_rate=0.1, weight_decay=0.01),
    "sgd decoupled": Sgd(learning_rate=0.1, weight_decay=0.01, weight_decay_mode="decoupled"),
    "adagrad": Adagrad(learning_rate=0.1),
    "rowwise": RowwiseAdagrad(learning_rate=0.1, weight_decay=0.01),
    "rowwise max norm": RowwiseAdagrad(learning_rate=0.1, max_norm=0.9),
    "adam": Adam(learning_rate=0.1, weight_decay=0.01, weight_decay_mode="decoupled"),
    "partial adam": PartialRowwiseAdam(learning_rate=0.1),
    "lamb": Lamb(learning_rate=0.1, weight_decay=0.01),
    "partial lamb": PartialRowwiseLamb(learning_rate=0.1),
    "lars": LarsSgd(learning_rate=1.0, weight_decay=0.01),
}


def wide_tables(optimizer):
    return tuple(dataclasses.replace(table, dim=32) for table in tables_of(optimizer))


def plan_of(kind, tables, replicas="shard"):
    columns = 2 if kind in ("column_wise", "table_column_wise", "grid") else 1
    return ShardingPlan(
        tables=tuple(TablePlan(table=t.name, kind=kind, columns=columns) for t in tables), replicas=replicas
    )


def given_grads(tables, host, seed=5):
    """Given, not computed: a gradient that the model computes may differ in its last bit from mesh to mesh.

    Positions without a row have one too, which no row must see.
    """
    rng = np.random.default_rng(seed)
    shapes = {t.name: {"rows": np.zeros((t.rows, t.dim), np.float32)} for t in tables}
    return {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in numpy_lookup(tables, shapes, host).items()
    }


def batch(size, *, weighted=False, seed=0):
    """Host batch of SCHEMA with empty bags and many duplicates."""
    rng = np.random.default_rng(seed)
    lengths, values = [], []
    for feature in SCHEMA.categorical:
        own = np.full(size, feature.length) if feature.length is not None else rng.integers(0, 4, size)
        lengths.append(own)
        values.append(rng.zipf(1.3, own.sum()) % feature.rows)
    values = np.concatenate(values)
    weights = rng.normal(size=values.size).astype(np.float32) if weighted else None
    return HostKeyedJagged(SCHEMA.keys, values, np.stack(lengths).astype(np.int32), weights)


def schema_of(lengths, rows):
    return Schema(categorical=tuple(Categorical(name=n, rows=rows, length=k) for n, k in lengths.items()))


def device_features(collection, host, size, schema=SCHEMA):
    """Device form of a host batch; abstract if there is none."""
    if schema is SCHEMA and host is not None and len(host.keys) == 1:
        schema = Schema(categorical=schema.categorical[:1])
    layout = collection.layout(schema, size)
    shards = collection.mesh.size
    everywhere = meshes.everywhere(collection.mesh)
    if host is None:
        slots = sum(f.capacity for f in layout)
        return jagged.DeviceJagged(
            jax.ShapeDtypeStruct((shards, slots), np.int32, sharding=everywhere),
            jax.ShapeDtypeStruct((shards, len(layout) * size // shards), np.int32, sharding=everywhere),
            None,
            layout,
        )
    return placed(collection, collection.pack(host, shards, layout))


def placed(collection, packed):
    """What was packed, on the devices."""
    return jagged.to_device(packed, collection.mesh)


def occurrences(tables, host):
    """(table, feature, example, position in its bag, id, weight) of every id."""
    of_feature = {name: table for table in tables for name in table.features}
    at = 0
    for f, name in enumerate(host.keys):
        for example, length in enumerate(host.lengths[f]):
            for position in range(length):
                weight = 1.0 if host.weights is None else float(host.weights[at])
                yield of_feature[name], name, example, position, int(host.values[at]), weight
                at += 1


def numpy_lookup(tables, logical, host):
    examples, out = host.lengths.shape[1], {}
    for table in tables:
        for name in table.features:
            shape = (examples, table.dim)
            if table.pooling == "none":
                shape = (examples, SCHEMA[name].length or SCHEMA[name].max_length, table.dim)
            out[name] = np.zeros(shape)
    for table, name, example, position, row, weight in occurrences(tables, host):
        vector = weight * logical[table.name]["rows"][row].astype(np.float64)
        if table.pooling == "mean":
            vector = vector / host.lengths[host.keys.index(name), example]
        if table.pooling == "none":
            out[name][example, position] = vector
        else:
            out[name][example] += vector
    return out


def numpy_update(tables, logical, host, grads, dtype=np.float64, updates=0):
    """One optimizer step on the touched rows; returns (new logical state, touched rows by table).

    In float32 every operation is rounded by itself and gradients are added one by one, by example, feature, position;
    means are products with the reciprocal.
    """
    sums: dict = {table.name: {} for table in tables}
    in_order = sorted(occurrences(tables, host), key=lambda o: (o[2], o[0].features.index(o[1]), o[3]))
    for table, name, example, position, row, weight in in_order:
        grad = grads[name][example].astype(dtype)
        if table.pooling == "none":
            grad = grad[position]
        if table.pooling == "mean":
            grad = grad * (dtype(1) / dtype(host.lengths[host.keys.index(name), example]))
        sums[table.name][row] = sums[table.name].get(row, dtype(0)) + dtype(weight) * grad
    new = {name: {leaf: value.astype(dtype) for leaf, value in leaves.items()} for name, leaves in logical.items()}
    for table in tables:
        for row, grad in sums[table.name].items():
            _numpy_step(table, new[table.name], row, grad, updates, dtype)
    return new, {name: set(rows) for name, rows in sums.items()}


def sum_of_squares(x):
    """By blocks of 16 columns, each a binary tree of halves, then block after block."""
    blocks = np.pad(x * x, (0, -len(x) % 16)).reshape(-1, 16)
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    total = blocks[0, 0]
    for block in blocks[1:, 0]:
        total = total + block
    return total


def _numpy_step(table, leaves, row, grad, updates, dtype):
    opt = table.optimizer
    rate, decay = dtype(opt.learning_rate), dtype(opt.weight_decay)
    w = leaves["rows"][row].copy()
    own_decay = isinstance(opt, Lamb | LarsSgd)
    if decay and opt.weight_decay_mode == "l2" and not own_decay:
        grad = grad + decay * w
    match opt:
        case Sgd():
            change = rate * grad
        case Adagrad():
            leaves["accumulator"][row] += grad * grad
            change = rate * grad / (np.sqrt(leaves["accumulator"][row]) + dtype(opt.eps))
        case RowwiseAdagrad(statistic="slice") if leaves["accumulator"].ndim == 2:
            accumulator = leaves["accumulator"][row]
            parts = np.split(grad, len(accumulator))
            accumulator += np.array([sum_of_squares(part) * dtype(1 / len(part)) for part in parts])
            factors = rate / (np.sqrt(accumulator) + dtype(opt.eps))
            change = np.concatenate([factor * part for factor, part in zip(factors, parts, strict=True)])
        case RowwiseAdagrad():
            leaves["accumulator"][row] += sum_of_squares(grad) * dtype(1 / table.dim)
            change = rate / (np.sqrt(leaves["accumulator"][row]) + dtype(opt.eps)) * grad
        case LarsSgd():
            norm, slope = np.sqrt(sum_of_squares(w)), np.sqrt(sum_of_squares(grad))
            adapted = opt.eta * norm / (slope + decay * norm) if norm and slope else opt.eta
            leaves["momentum"][row] = opt.momentum * leaves["momentum"][row] + rate * adapted * (grad + decay * w)
            change = leaves["momentum"][row]
        case Adam() | PartialRowwiseAdam() | Lamb():
            by_row = isinstance(opt, PartialRowwiseAdam | PartialRowwiseLamb)
            square = (grad * grad).mean() if by_row else grad * grad
            leaves["moment1"][row] = opt.beta1 * leaves["moment1"][row] + (1 - opt.beta1) * grad
            leaves["moment2"][row] = opt.beta2 * leaves["moment2"][row] + (1 - opt.beta2) * square
            first = leaves["moment1"][row] / (1 - opt.beta1 ** (updates + 1))
            second = leaves["moment2"][row] / (1 - opt.beta2 ** (updates + 1))
            direction = first / (np.sqrt(second) + opt.eps)
            if isinstance(opt, Lamb):
                direction = direction + decay * w
                ratio = np.sqrt((w * w).sum()) / np.sqrt((direction * direction).sum())
                direction = ratio * direction
            change = rate * direction
    if decay and opt.weight_decay_mode == "decoupled" and not own_decay:
        w = (1 - rate * decay) * w
    w = w - change
    if opt.max_norm is not None:
        norm = np.sqrt(sum_of_squares(w))
        w = w * dtype(min(1.0, opt.max_norm / norm))
    leaves["rows"][row] = w


def random_logical(collection, seed=11):
    """Logical state with rows in [-0.3, 0.3] and accumulators in [0.1, 0.2]."""
    rng = np.random.default_rng(seed)
    logical = {}
    for table in collection.tables:
        leaves = collection.abstract_logical()[table.name]
        logical[table.name] = {
            name: (rng.uniform(-0.3, 0.3, leaf.shape) if name == "rows" else rng.uniform(0.1, 0.2, leaf.shape)).astype(
                leaf.dtype
            )
            for name, leaf in leaves.items()
        }
    return logical


def places(collection):
    """(stack, member, device and local row of every row): the placement, spelled out row by row.

    A device is numbered among those that hold one copy of the tables.
    """
    for stack in collection.stacks:
        ends = [0] * collection.sharded.group_devices
        for number, member in enumerate(stack.members):
            ranks = member.ranks or (0,)
            n = len(ranks)
            rows = range(member.config.rows)
            where = [(ranks[(row + number) % n], ends[ranks[(row + number) % n]] + row // n) for row in rows]
            yield stack, member, np.array(where).T
            for rank in ranks:
                ends[rank] += -(-member.config.rows // n)


def numpy_stack(collection, logical, updates=0):
    """The view of a logical state, placed on the devices."""
    abstract = collection.abstract_state()
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    state["updates"] = np.asarray(updates, np.int32)
    for stack, member, (device, local) in places(collection):
        for name, view in state["stacks"][stack.name].items():
            by_device = view.reshape(stack.devices, -1, *view.shape[1:])
            by_device[device, local] = _columns(collection, member, logical[member.config.name][name])
    return jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), state, abstract)


def numpy_unstack(collection, state):
    """The logical state of a view."""
    shapes = collection.abstract_logical()
    logical = {t: {name: np.zeros(x.shape, x.dtype) for name, x in leaves.items()} for t, leaves in shapes.items()}
    for stack, member, (device, local) in places(collection):
        for name, view in state["stacks"][stack.name].items():
            view = np.asarray(view)
            view = view.reshape(stack.devices, -1, *view.shape[1:])
            leaf = logical[member.config.name][name]
            _columns(collection, member, leaf)[...] = view[device, local]
    return logical


def _columns(collection, member, leaf):
    """The part of a leaf of a table that a member holds, as a view."""
    if leaf.ndim == 1:
        return leaf
    if leaf.shape[1] == member.config.dim:
        return leaf[:, member.start : member.stop]
    return leaf[:, member.start // (member.stop - member.start)]  # one statistic a slice


def two_steps(on, features, grads, logical=None):
    """As `steps`, two of them."""
    return steps(on, features, grads, 2, logical)


def steps(on, features, grads, count, logical=None):
    """(what was looked up first, rows and states after some steps with the same given gradients)."""

    @jax.jit
    def step(state, features, grads):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads)

    embedded, state = step(numpy_stack(on, random_logical(on) if logical is None else logical), features, grads)
    for _ in range(count - 1):
        _, state = step(state, features, grads)
    assert not np.asarray(on.faults(state)).any()
    assert int(state["updates"]) == count
    return {name: np.asarray(x) for name, x in embedded.items()}, numpy_unstack(on, state)


SIX_WIDTHS = (2, 4, 6, 8, 16, 24)


def six_widths(recipe):
    """A recipe of Wukong on the flights whose tables are of six widths."""
    model = dataclasses.replace(
        recipe.model,
        narrow=(
            NarrowGroup(features=("weekday",), dim=2),
            NarrowGroup(features=("month", "hour"), dim=4),
            NarrowGroup(features=("carrier",), dim=6),
        ),
        important=(Important(feature="origin", vectors=2), Important(feature="dest", vectors=3)),
    )
    return dataclasses.replace(recipe, model=model)
