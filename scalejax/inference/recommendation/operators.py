"""The operators of a dense part: modules that own parameters, each with a precision of its own.

A `Linear` may become float16 or int8; every other module (a `Mix` of Wukong, a norm, the weights of logistic
regression) float16. Models know nothing of it: a module of a model that was put together for one trace is replaced by
a callable.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.kernels.block_quant import dense
from scalejax.kernels.block_quant.dense import Int8Weight
from scalejax.train.state import ModelShape

ROOT = "model"
"""Name of the operator of parameters that the model itself owns."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """A module that owns parameters.

    Attributes:
      path: Names parted by "/", or ROOT.
      kind: "linear", a matrix and a bias, or "other".
      params: Paths of its parameters.
    """

    path: str
    kind: Literal["linear", "other"]
    params: tuple[str, ...]

    @property
    def keys(self) -> tuple[str | int, ...]:
        """The path as attributes and indices."""
        if self.path == ROOT:
            return ()
        return tuple(int(part) if part.isdecimal() else part for part in self.path.split("/"))


def find(shape: ModelShape) -> dict[str, Operator]:
    """The operators of a dense part by path, in the order of its parameters."""
    abstract = nnx.merge(shape.graph, jax.tree.unflatten(shape.treedef, [shape.params[n] for n in shape.names]))
    linear = {
        "/".join(map(str, path))
        for path, m in nnx.iter_modules(abstract)
        if isinstance(m, nn.Linear) and m.kernel.ndim == 2  # one of towers is a stack of matrices
    }
    owned: dict[str, list[str]] = {}
    for name in shape.names:
        path = name.rpartition("/")[0] or ROOT
        owned.setdefault(path, []).append(name)
    return {
        path: Operator(path, "linear" if path in linear else "other", tuple(names)) for path, names in owned.items()
    }


def get(module: object, keys: tuple[str | int, ...]) -> Any:
    """A module inside another."""
    for key in keys:
        module = module[key] if isinstance(module, nnx.List | nnx.Dict) else getattr(module, str(key))  # pyright: ignore
    return module


def replace(module: object, keys: tuple[str | int, ...], make: Callable[[Any], object]) -> None:
    """Puts `make(old)` in the place of a module inside another."""
    parent, last = get(module, keys[:-1]), keys[-1]
    made = make(get(parent, keys[-1:]))
    if isinstance(parent, nnx.List | nnx.Dict):
        parent[last] = made  # pyright: ignore[reportArgumentType]
    else:
        setattr(parent, str(last), made)


class Int8Linear:
    """y = x W + b as products of 8-bit integers."""

    def __init__(self, weight: Int8Weight, limits: tuple[jax.Array, jax.Array] | None, linear: nn.Linear) -> None:
        self.weight, self.limits, self.bias, self.out_dtype = weight, limits, linear.bias, linear.out_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        y = dense.int8_matmul(x, self.weight, limits=self.limits) + self.bias[...].astype(jnp.float32)[None, :]
        return y.astype(self.out_dtype)


class FakeInt8Linear:
    """A linear layer whose input goes through 8-bit codes where `on` is true: the numbers of `Int8Linear`, but for
    float32 rounding of its sums, in a program that is the same for every choice."""

    def __init__(self, linear: nn.Linear, on: jax.Array, limits: tuple[jax.Array, jax.Array]) -> None:
        self.linear, self.on, self.limits = linear, on, limits

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(jnp.where(self.on, dense.fake_quantize(x, *self.limits), x.astype(jnp.float32)))


class Recorder:
    """An operator that keeps what it was called with and what it returned; for calls outside of jit."""

    def __init__(self, operator: Callable[..., jax.Array]) -> None:
        self.operator = operator
        self.calls: list[tuple[tuple[object, ...], dict[str, object], jax.Array]] = []

    def __call__(self, *args: object, **kwargs: object) -> jax.Array:
        result = self.operator(*args, **kwargs)
        self.calls.append((args, kwargs, result))
        return result


def record(module: nnx.Module, found: dict[str, Operator]) -> dict[str, Recorder]:
    """Puts a recorder around every operator but ROOT; innermost first, so that each sees all of its calls."""
    recorders: dict[str, Recorder] = {}
    for operator in sorted(found.values(), key=lambda o: -len(o.keys)):
        if operator.path != ROOT:

            def wrap(old: Callable[..., jax.Array], path: str = operator.path) -> Recorder:
                recorders[path] = Recorder(old)
                return recorders[path]

            replace(module, operator.keys, wrap)
    return {path: recorders[path] for path in found if path in recorders}
