"""Tables, batches and literal NumPy oracles that several embedding tests share."""

import jax
import numpy as np

from scalejax.data.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding import jagged
from scalejax.parallel.embedding.config import Adagrad, RowwiseAdagrad, Sgd, TableConfig

SHARED_ROWS, BIG_ROWS, TINY_ROWS = 13, 1030, 3
"""None divides by 8; one has fewer rows than devices, one more than a granule of the stored form."""

SCHEMA = Schema(
    categorical=(
        Categorical(name="one", rows=SHARED_ROWS),
        Categorical(name="bag", rows=SHARED_ROWS, length=None, capacity=4),
        Categorical(name="fixed", rows=BIG_ROWS, length=2),
        Categorical(name="sequence", rows=TINY_ROWS, length=3),
        Categorical(name="mean_bag", rows=BIG_ROWS, length=None, capacity=4),
    )
)


def tables_of(optimizer):
    """Two features on one table, fixed and jagged, sum, mean and none, two widths."""
    return (
        TableConfig(name="shared", rows=SHARED_ROWS, dim=4, features=("one", "bag"), optimizer=optimizer),
        TableConfig(name="big", rows=BIG_ROWS, dim=4, features=("fixed",), optimizer=optimizer),
        TableConfig(name="means", rows=BIG_ROWS, dim=4, features=("mean_bag",), pooling="mean", optimizer=optimizer),
        TableConfig(name="tiny", rows=TINY_ROWS, dim=3, features=("sequence",), pooling="none", optimizer=optimizer),
    )


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
    if len(schema.categorical) == 5 and host is not None and len(host.keys) == 1:
        schema = Schema(categorical=schema.categorical[:1])
    layout = collection.layout(schema, size)
    shards = collection.mesh.size
    everywhere = meshes.everywhere(collection.mesh)
    along = jax.sharding.NamedSharding(collection.mesh, jax.sharding.PartitionSpec(None, meshes.AXES))
    if host is None:
        slots = sum(f.capacity for f in layout)
        return jagged.KeyedJagged(
            jax.ShapeDtypeStruct((shards, slots), np.int32, sharding=everywhere),
            jax.ShapeDtypeStruct((len(layout), size), np.int32, sharding=along),
            None,
            layout,
        )
    collection.check_on_host(host, shards, layout)
    values, lengths, weights = jagged.pack(host, layout, shards)
    return jagged.KeyedJagged(
        jax.device_put(values, everywhere),
        jax.device_put(lengths, along),
        None if weights is None else jax.device_put(weights, everywhere),
        layout,
    )


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
            f = host.keys.index(name)
            shape = (examples, table.dim)
            if table.pooling == "none":
                shape = (examples, int(host.lengths[f, 0]), table.dim)
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


def numpy_update(tables, logical, host, grads, dtype=np.float64):
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
        leaves, opt = new[table.name], table.optimizer
        rate = dtype(opt.learning_rate)
        for row, grad in sums[table.name].items():
            grad = grad + dtype(opt.weight_decay) * leaves["rows"][row]
            match opt:
                case Sgd():
                    leaves["rows"][row] -= rate * grad
                case Adagrad():
                    leaves["accumulator"][row] += grad * grad
                    leaves["rows"][row] -= rate * grad / (np.sqrt(leaves["accumulator"][row]) + dtype(opt.eps))
                case RowwiseAdagrad():
                    leaves["accumulator"][row] += sum(grad * grad) * dtype(1 / table.dim)
                    leaves["rows"][row] -= rate / (np.sqrt(leaves["accumulator"][row]) + dtype(opt.eps)) * grad
    return new, {name: set(rows) for name, rows in sums.items()}


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
    """(stack, table, device and local row of every row): the placement, spelled out row by row."""
    devices = collection.mesh.size
    for stack in collection.stacks:
        offset = 0
        for number, member in enumerate(stack.members):
            table = member.config
            where = [((row + number) % devices, offset + row // devices) for row in range(table.rows)]
            yield stack.name, table.name, np.array(where).T
            offset += -(-table.rows // devices)


def numpy_stack(collection, logical):
    """The view of a logical state, placed on the devices."""
    abstract, devices = collection.abstract_state(), collection.mesh.size
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    for stack, table, (device, local) in places(collection):
        for name, view in state["stacks"][stack].items():
            view.reshape(devices, -1, *view.shape[1:])[device, local] = logical[table][name]
    return jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), state, abstract)


def numpy_unstack(collection, state):
    """The logical state of a view."""
    logical: dict = {}
    for stack, table, (device, local) in places(collection):
        for name, view in state["stacks"][stack].items():
            view = np.asarray(view)
            view = view.reshape(collection.mesh.size, -1, *view.shape[1:])
            logical.setdefault(table, {})[name] = view[device, local]
    return logical
