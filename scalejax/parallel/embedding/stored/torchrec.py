"""Coming from TorchRec: its table configs and checkpoints as ours, and back. Nothing of torch is imported.

    tables = torchrec.tables(ebc.embedding_bag_configs(), RowwiseAdagrad(learning_rate=0.01))
    logical = torchrec.read_state([model.state_dict()], [model.fused_optimizer.state_dict()], tables)
    state = collection.from_logical(logical)                  # any mesh, any plan

TorchRec keeps a table as "PREFIXembedding_bags.TABLE.weight" (or "embeddings."), on every rank the shards that it has,
and its optimizer's state under the same key, as "TABLE.momentum1" and so on. One state dict per rank goes in; shards
are put where their offsets say.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import (
    Pooling,
    RowOptimizer,
    TableConfig,
    row_states,
)
from scalejax.parallel.embedding.update.optimizers import initial_value

Logical = dict[str, dict[str, np.ndarray]]

_WEIGHT = re.compile(r"(?:^|.*\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")
_POOLING: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean", "NONE": "none"}
_DTYPES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
_NAMES = {
    "accumulator": ("momentum1", "sum"),
    "momentum": ("momentum1",),
    "moment1": ("exp_avg", "momentum1"),
    "moment2": ("exp_avg_sq", "momentum2"),
}
"""Our row state -> what TorchRec and FBGEMM call it, the name that is written first."""


def tables(configs: Iterable[Any], optimizer: RowOptimizer) -> tuple[TableConfig, ...]:
    """`EmbeddingBagConfig`s and `EmbeddingConfig`s -> tables.

    Args:
      configs: Objects with name, num_embeddings, embedding_dim, feature_names, data_type and, if pooled, pooling.
      optimizer: The row optimizer: TorchRec attaches it to the parameters, not to the configs.

    Raises:
      UserError: a data type that tables here do not have.
    """
    made = []
    for config in configs:
        kind = config.data_type.value
        if kind not in _DTYPES:
            raise UserError(
                f"table {config.name!r} has data type {kind}; tables here hold {', '.join(_DTYPES)}. Convert it first."
            )
        pooling = getattr(config, "pooling", None)
        made.append(
            TableConfig(
                name=config.name,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                features=tuple(config.feature_names),
                pooling=_POOLING["NONE" if pooling is None else pooling.value],
                dtype=_DTYPES[kind],
                optimizer=optimizer,
            )
        )
    return tuple(made)


def read_state(
    models: Sequence[Mapping[str, object]], optimizers: Sequence[Mapping[str, Any]], tables: Sequence[TableConfig]
) -> Logical:
    """Rows and row states of all tables, for `EmbeddingCollection.from_logical`.

    Args:
      models: `state_dict()` of the model, one per rank; other entries are left alone.
      optimizers: `fused_optimizer.state_dict()`, one per rank; empty = row states begin at their initial values.
      tables: As from `tables`.

    Raises:
      UserError: a table or a state is missing, has another shape, or has rows that no rank holds or two hold.
    """
    weights = [{m[1]: value for key, value in model.items() if (m := _WEIGHT.match(key))} for model in models]
    states = [_states(optimizer) for optimizer in optimizers]
    return {table.name: _table(table, weights, states) for table in tables}


def write_state(
    logical: Mapping[str, Mapping[str, np.ndarray | jax.Array]], tables: Sequence[TableConfig]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, dict[str, np.ndarray]]]]:
    """The inverse of `read_state`: state dicts of one rank that holds everything, in NumPy.

    Args:
      logical: From `EmbeddingCollection.to_logical`.
      tables: The tables.

    Returns:
      {"embedding_bags.TABLE.weight": array} and {"state": {the same keys: {"TABLE.momentum1": array}}}; hand each array
      to `torch.from_numpy` (bfloat16 after `.view("int16")`, then `.view(torch.bfloat16)`).
    """
    model, state = {}, {}
    for table in tables:
        key = f"embedding_bags.{table.name}.weight"
        leaves = logical[table.name]
        model[key] = np.asarray(leaves["rows"])
        state[key] = {
            f"{table.name}.{_NAMES[name][0]}": np.asarray(leaves[name]) for name in row_states(table.optimizer)
        }
    return model, {"state": state}


def _states(optimizer: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """{table: {"momentum1": ...}}."""
    found: dict[str, dict[str, object]] = {}
    for key, values in optimizer.get("state", {}).items():
        match = _WEIGHT.match(key)
        if match:
            found[match[1]] = {name.rpartition(".")[2]: value for name, value in values.items()}
    return found


def _table(
    table: TableConfig, weights: list[dict[str, object]], states: list[dict[str, dict[str, object]]]
) -> dict[str, np.ndarray]:
    held = [model[table.name] for model in weights if table.name in model]
    if not held:
        present = sorted({name for model in weights for name in model})
        raise UserError(f"table {table.name!r} is in no state dict; they hold {', '.join(present) or 'no tables'}.")
    leaves = {"rows": _joined(f"the rows of table {table.name!r}", held, (table.rows, table.dim), table.dtype)}
    for name, kind in row_states(table.optimizer).items():
        shape = (table.rows, table.dim) if kind == "element" else (table.rows,)
        if not states:
            leaves[name] = np.full(shape, initial_value(table.optimizer), np.float32)
            continue
        own = [state.get(table.name, {}) for state in states]
        held = [state[alias] for state in own for alias in _NAMES[name] if alias in state]
        if not held:
            has = sorted({name for state in own for name in state})
            raise UserError(
                f"table {table.name!r}: {type(table.optimizer).__name__} wants the state {' or '.join(_NAMES[name])}; "
                f"the optimizer's state dicts have {', '.join(has) or 'none'} for it. Name the optimizer that it was "
                "trained with."
            )
        leaves[name] = _joined(f"{name} of table {table.name!r}", held, shape, "float32")
    return leaves


def _joined(what: str, held: list[object], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """One array of the shards that ranks hold."""
    whole = np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
    seen = np.zeros(shape, np.uint8)
    for value in held:
        for offsets, part in _shards(value):
            span = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=False))
            if part.ndim != len(shape) or any(s.stop > n for s, n in zip(span, shape, strict=True)):
                raise UserError(
                    f"{what} have shape {tuple(part.shape)} at {tuple(offsets)} in a state dict; wanted {shape}. Give "
                    "the table the rows and width that it was trained with (row-wise states of column shards cannot "
                    "be joined: they are one statistic a shard)."
                )
            whole[span] = part
            seen[span] += 1
    if (seen != 1).any():
        where = int(np.argwhere(seen != 1)[0][0])
        raise UserError(
            f"{what}: row {where} is held {int(seen[where].reshape(-1)[0])} times by the {len(held)} state dicts; "
            "wanted once. Give the state dict of every rank, once."
        )
    return whole


def _shards(value: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """(offsets, values) of what a rank holds of a tensor."""
    if hasattr(value, "local_shards"):  # a ShardedTensor
        shards = value.local_shards()
        return [(tuple(shard.metadata.shard_offsets), _numpy(shard.tensor)) for shard in shards]
    array = _numpy(value)
    return [((0,) * array.ndim, array)]


def _numpy(tensor: Any) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)  # NumPy knows no bfloat16; nothing is rounded
    return tensor.numpy()
