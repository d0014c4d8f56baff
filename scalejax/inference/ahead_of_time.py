"""The programs of an engine for devices that need not be here: to compile them, and to read what was compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax import nn
from scalejax.inference.generate import Engine
from scalejax.inference.programs import DecodingState, Slots
from scalejax.inference.sampling import RowSampling
from scalejax.models.llm import families
from scalejax.models.llm.architecture import LanguageConfig
from scalejax.nn import counts
from scalejax.nn.pages import KvFormat
from scalejax.parallel.context_choice import Passed
from scalejax.parallel.rules import LLM
from scalejax.train.state import ModelShape


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractEngine:
    """An engine without parameters.

    Attributes:
      engine: It.
      params: Shapes and places of the parameters, by path.
      pages: Size of the cache.
      cache: Shapes and places of its arrays.
    """

    engine: Engine
    params: Mapping[str, jax.ShapeDtypeStruct]
    pages: nn.PageShape
    cache: Any

    @classmethod
    def of(
        cls,
        config: LanguageConfig,
        mesh: Mesh,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        kv_tokens: int,
        page: int = 64,
        kv_dtype: KvFormat = "compute",
    ) -> "AbstractEngine":
        """That of a model whose vocabulary is known, with a cache of at least `kv_tokens` tokens."""
        model = counts.abstract(families.of(config).build, config, dtypes=nn.Dtypes(dtype, dtype))
        assert isinstance(model, nnx.Module)
        shape = ModelShape.of(model)
        engine = Engine(config, shape, {}, mesh)
        placed = shape.shardings(mesh, LLM)
        params = {
            name: _leaf(p.shape, p.dtype, engine.programs.format(name, placed[name]))
            for name, p in shape.params.items()
        }
        devices = engine.programs.groups * engine.programs.ranks
        pages = nn.PageShape(devices * -(-kv_tokens // (page * devices)), page, kv_dtype)
        cache = engine.programs.cache(pages)
        cache = jax.tree.map(lambda a, s: _leaf(a.shape, a.dtype, s), cache, engine.programs.cache_shardings(cache))
        return cls(engine, params, pages, cache)

    @property
    def kv_bytes(self) -> int:
        """Of the cache, on each device."""
        return sum(Engine.device_bytes(a, a.sharding) for a in jax.tree.leaves(self.cache))

    @property
    def held_bytes(self) -> int:
        """Of the parameters, on each device."""
        return sum(Engine.device_bytes(a, a.sharding) for a in self.params.values())

    def read(self, rows: int, tokens: int, passed: Passed = "pass_kv") -> "jax.stages.Lowered":
        """The program that reads a piece: rows of so many columns, behind all that the cache holds."""
        reading = nn.Reading(self._int(rows, tokens), self._table(rows), self._int(rows), self._int(rows))
        if self.engine.programs.ranks > 1:
            reading = dataclasses.replace(reading, places=self._int(rows, tokens), passed=passed)
        program: Any = self.engine.programs.read
        return program.lower(self.params, self._int(rows, tokens), reading, self._int(rows), self._state(rows))

    def decode(self, slots: int) -> "jax.stages.Lowered":
        """The program that generates a block, all slots with all units of the cache."""
        how = jax.tree.map(lambda a: self._whole(a.shape, a.dtype), RowSampling.greedy(slots))
        row = self._int(slots)
        rows = Slots(how, row, row, self._int(slots, 8), self._table(slots), row, row)
        program: Any = self.engine.programs.decode
        return program.lower(self.params, self._state(slots), rows, self._int(), self._whole((), jnp.bool_))

    def _state(self, slots: int) -> DecodingState:
        vocabulary = self.engine.config.vocabulary or 0
        programs = self.engine.programs
        dtype, sharding = nn.wide(programs.compute_dtype), programs.logits_sharding(slots)
        logits: Any = _leaf((slots, vocabulary), dtype, sharding)
        return DecodingState(self.cache, logits)

    def _table(self, rows: int) -> Any:
        each = self.engine.programs.groups * self.engine.programs.ranks
        return self._int(rows, self.pages.pages // each)

    def _int(self, *shape: int) -> Any:
        return self._whole(shape, jnp.int32)

    def _whole(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        return _leaf(shape, dtype, NamedSharding(self.engine.mesh, P()))


def _leaf(shape: Sequence[int], dtype: DTypeLike, sharding: Sharding | Format) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
