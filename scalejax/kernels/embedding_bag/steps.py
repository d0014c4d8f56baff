"""Optimizer steps inside a kernel.

A step is any function of (rows and their states, gradients); what it takes from around itself (a learning rate that a
schedule computed) is data of the program, which a kernel cannot see unless it is handed in. So a step is traced on the
shapes of one block, what it captured becomes arguments, and the kernel evaluates the trace.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.extend.core import Jaxpr, Literal

Step = Callable[[tuple[jax.Array, ...], jax.Array], Sequence[jax.Array]]
"""((rows, *states), gradients) -> (rows, *states) after it."""


@dataclasses.dataclass(frozen=True)
class ClosedStep:
    """A step on blocks of fixed shapes whose captured scalars are arguments.

    Attributes:
      jaxpr: Its trace.
      scalars: What it captured, each of shape (1,).
    """

    jaxpr: Jaxpr
    scalars: tuple[jax.Array, ...]

    def __call__(
        self,
        scalars: tuple[jax.Array, ...],
        arrays: tuple[jax.Array, ...],
        grads: jax.Array,
        replacements: Mapping[str, Callable[..., jax.Array]] | None = None,
    ) -> list[jax.Array]:
        """Applies it; `scalars` has shape () each.

        `replacements` computes primitives, by their names, that the kernel's compiler lacks: operands and parameters to
        the one result.
        """
        if replacements is None:
            return core.eval_jaxpr(self.jaxpr, scalars, *arrays, grads)
        return _evaluate(self.jaxpr, scalars, (*arrays, grads), replacements)


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Calls by where they keep what they call; nobody asks for derivatives of their own inside a kernel."""


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[jax.Array],
    values: Sequence[jax.Array],
    replacements: Mapping[str, Callable[..., jax.Array]],
) -> list[jax.Array]:
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands, params, name = [read(v) for v in equation.invars], equation.params, equation.primitive.name
        if name in replacements:
            made = [replacements[name](*operands, **params)]
        elif name in _CALLS:
            inner = params[_CALLS[name]]
            made = _evaluate(inner.jaxpr, inner.consts, operands, replacements)
        else:
            made = equation.primitive.bind(*operands, **params)
            made = made if equation.primitive.multiple_results else [made]
        known.update(zip(equation.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def close(step: Step, arrays: tuple[jax.ShapeDtypeStruct, ...], grads: jax.ShapeDtypeStruct) -> ClosedStep:
    """Traces `step` on blocks of the given shapes.

    Raises:
      ValueError: it captures something that is not a scalar, or does not return what it was given.
    """
    # A function of its own: jax remembers traces by function, and what this one captured belongs to one outer trace.
    closed, made = jax.make_jaxpr(lambda a, g: step(a, g), return_shape=True)(arrays, grads)
    made = tuple(made)
    if [m.shape for m in made] != [a.shape for a in arrays]:
        raise ValueError(
            "update_rows: step must return its arrays, (rows, *states), in their shapes "
            f"{[a.shape for a in arrays]}; got {[m.shape for m in made]}."
        )
    for captured in closed.consts:
        if jnp.shape(captured) != ():
            raise ValueError(
                "update_rows: besides its arguments, step may use scalars; it captures "
                f"{jnp.result_type(captured)}{list(jnp.shape(captured))}. Make it a row state, or name "
                'implementation="xla".'
            )
    return ClosedStep(closed.jaxpr, tuple(jnp.asarray(c).reshape(1) for c in closed.consts))
