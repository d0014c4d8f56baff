"""The arrays of a language model and of its cache as they would be served, none of which is made."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from scalejax import nn
from scalejax.models.llm import families
from scalejax.models.llm.architecture import Cache, LanguageConfig, LanguageModule
from scalejax.nn import counts
from scalejax.nn.pages import KvFormat
from scalejax.parallel.rules import LogicalAxes
from scalejax.train.state import ModelShape

CacheArrays = tuple[tuple[str, jax.ShapeDtypeStruct, LogicalAxes], ...]
"""(field of `nn.PagedCache`, array, names of its axes); a model may have several caches."""


def arrays_of(
    config: LanguageConfig, mesh: AbstractMesh, *, dtype: DTypeLike, page: int, kv_dtype: KvFormat
) -> tuple[ModelShape, CacheArrays]:
    """Parameters, and a cache of one page for each device along `context`.

    Args:
      config: With a vocabulary.
      mesh: Where it would be served.
      dtype: Of parameters and activations.
      page: Places of a page.
      kv_dtype: How keys and values are stored, see `nn.pages`.

    Raises:
      UserError: it is no language model, cannot go on with a cache, or does not run on such a mesh.
    """
    abstract = counts.abstract(families.of(config).build, config, dtypes=nn.Dtypes(dtype, dtype))
    assert isinstance(abstract, nnx.Module)
    shape = ModelShape.of(abstract)
    jax.eval_shape(functools.partial(_extended, shape), {**shape.params, **shape.variables})
    with jax.sharding.use_abstract_mesh(mesh):
        cache = jax.eval_shape(lambda: _model(shape).cache(nn.PageShape(mesh.shape["context"], page, kv_dtype)))
        found: list[tuple[str, jax.ShapeDtypeStruct, LogicalAxes]] = []
        for part in jax.tree.leaves(cache, is_leaf=lambda part: isinstance(part, nn.PagedCache)):
            axes = part.axes()
            for field in dataclasses.fields(part):
                if (array := getattr(part, field.name)) is not None:
                    found.append((field.name, array, getattr(axes, field.name)))
    return shape, tuple(found)


def _model(shape: ModelShape, params: "dict[str, jax.ShapeDtypeStruct] | None" = None) -> LanguageModule:
    return shape.merge(params or {**shape.params, **shape.variables})  # pyright: ignore[reportReturnType]


def _extended(shape: ModelShape, params: "dict[str, jax.ShapeDtypeStruct]") -> tuple[jax.Array, Cache]:
    """What a model does with a cache, which refuses models that cannot."""
    model, page = _model(shape, params), 16
    reading = nn.Reading.whole((1, page), jnp.full(1, page, jnp.int32), page)
    return model.extend(jnp.zeros((1, page), jnp.int32), reading, model.cache(nn.PageShape(1, page)))
