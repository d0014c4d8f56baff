"""Dense optimizers as data; `build(steps)` gives an optax transformation."""

import dataclasses
import re
from collections.abc import Hashable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax

from scalejax.errors import UserError, check_one_of
from scalejax.optim.layerwise import Lamb, Lans
from scalejax.optim.masks import check_paths, matrices
from scalejax.optim.schedules import Constant, Schedule, check_schedule

Counts = Literal["one", "each"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with optional (heavy-ball) momentum: torch.optim.SGD.

    Attributes:
      learning_rate: By step.
      momentum: Share of the last step that is taken again.
      weight_decay: Added to the gradient of every parameter, times the parameter, before momentum.
    """

    learning_rate: Schedule = Constant(value=1e-2)
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_schedule("Sgd: learning_rate", self.learning_rate)

    def build(self, steps: int) -> optax.GradientTransformation:
        descent = optax.sgd(self.learning_rate.build(steps), momentum=self.momentum or None)
        # Without decay the state stays what it was before there was any: checkpoints name its leaves.
        return optax.chain(optax.add_decayed_weights(self.weight_decay), descent) if self.weight_decay else descent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba, 2015).

    Attributes:
      learning_rate: By step.
      counts: Steps, which the correction of the bias goes by, are counted once for all parameters, or for "each" number
        of them, which takes as much memory as a moment: for what comes later than the rest (`surgery.units`).
    """

    learning_rate: Schedule = Constant(value=1e-3)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    counts: Counts = "one"

    def __post_init__(self) -> None:
        check_schedule("Adam: learning_rate", self.learning_rate)
        check_one_of("Adam: counts", self.counts, get_args(Counts))

    def build(self, steps: int) -> optax.GradientTransformation:
        rate = self.learning_rate.build(steps)
        if self.counts == "each":
            return optax.chain(_counting_each(self.b1, self.b2, self.eps), optax.scale_by_learning_rate(rate))
        return optax.adam(rate, b1=self.b1, b2=self.b2, eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamL2:
    """Adam of the loss plus l2 / 2 times the squared norm of some parameters: torch.optim.Adam with `weight_decay`.

    Attributes:
      learning_rate: By step.
      l2: Added to their gradient, times the parameter.
      only: Start of the paths of those parameters, "layers/0/" for the first layer; "" = all, biases included.
    """

    learning_rate: Schedule = Constant(value=1e-2)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    l2: float = 5e-4
    only: str = ""

    def __post_init__(self) -> None:
        check_schedule("AdamL2: learning_rate", self.learning_rate)

    def build(self, steps: int) -> optax.GradientTransformation:
        adam = optax.adam(self.learning_rate.build(steps), b1=self.b1, b2=self.b2, eps=self.eps)
        return optax.chain(optax.add_decayed_weights(self.l2, mask=self._chosen), adam)

    def _chosen(self, params: optax.Params) -> optax.Params:
        paths: list[str] = list(params)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        found = {name: name.startswith(self.only) for name in paths}
        own = [name for name, p in params.items() if not isinstance(p, optax.MaskedNode)]  # pyright: ignore[reportAttributeAccessIssue]
        if not any(found[name] for name in own):
            raise UserError(f"optimizer.only: no parameter begins with {self.only!r}; there are {', '.join(own)}.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) on matrices; biases and norms are not decayed.

    Attributes:
      learning_rate: By step.
      counts: As of `Adam`.
    """

    learning_rate: Schedule = Constant(value=1e-3)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    counts: Counts = "one"

    def __post_init__(self) -> None:
        check_schedule("AdamW: learning_rate", self.learning_rate)
        check_one_of("AdamW: counts", self.counts, get_args(Counts))

    def build(self, steps: int) -> optax.GradientTransformation:
        rate = self.learning_rate.build(steps)
        if self.counts == "each":
            return optax.chain(
                _counting_each(self.b1, self.b2, self.eps),
                optax.add_decayed_weights(self.weight_decay, matrices),
                optax.scale_by_learning_rate(rate),
            )
        return optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=matrices,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class For:
    """An optimizer for some parameters.

    Attributes:
      paths: Regular expression that names their paths whole: "embed/.*".
      optimizer: Theirs.
    """

    paths: str
    optimizer: Sgd | Adam | AdamL2 | AdamW | Lamb | Lans


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPath:
    """Other optimizers for other parameters; of the rules that name a parameter the first holds.

    ByPath(rules=(For(paths="embed/.*", optimizer=Sgd()), For(paths=".*", optimizer=AdamW())))
    """

    rules: tuple[For, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise UserError("optimizer.rules must have at least one rule, ByPath(rules=(For(...), ...)); got none.")
        for rule in self.rules:
            check_paths("optimizer.rules: paths", rule.paths)

    @property
    def learning_rate(self) -> Schedule:
        """The schedule that a run reports: that of the last rule, which mostly is the one for all other parameters."""
        return self.rules[-1].optimizer.learning_rate

    def of(self, path: str) -> Sgd | Adam | AdamL2 | AdamW | Lamb | Lans:
        """The optimizer of a parameter."""
        return next(rule.optimizer for rule in self.rules if re.fullmatch(rule.paths, path))

    def build(self, steps: int) -> optax.GradientTransformation:
        each: dict[Hashable, optax.GradientTransformation] = {
            f"{number}": rule.optimizer.build(steps) for number, rule in enumerate(self.rules)
        }
        return optax.partition(each, self._assigned)

    def _assigned(self, params: optax.Params) -> optax.Params:
        """{path: number of the rule that holds}."""
        paths: list[str] = list(params)  # pyright: ignore[reportArgumentType, reportAssignmentType]
        found = {}
        for path in paths:
            named = next((f"{n}" for n, rule in enumerate(self.rules) if re.fullmatch(rule.paths, path)), None)
            if named is None:
                raise UserError(
                    f"optimizer.rules: none names {path!r}. Add a last one for all others, For(paths='.*', ...)."
                )
            found[path] = named
        idle = [rule.paths for number, rule in enumerate(self.rules) if f"{number}" not in found.values()]
        if idle:
            raise UserError(
                f"optimizer.rules: {idle[0]!r} is the first to name none of the {len(paths)} trained parameters "
                f"({', '.join(paths[:3])}, ...). Put it before the rules that name the same, or leave it out; a "
                "phase that freezes what it names has to change the optimizer, too."
            )
        return found


def _counting_each(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """optax's Adam with a count for every number, in the place of one for all."""
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        counts = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int32), params)
        return adam.init(params)._replace(count=counts)  # pyright: ignore[reportAttributeAccessIssue]

    def update(
        grads: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        del params
        leaves, structure = jax.tree.flatten(grads)
        parts = (jax.tree.leaves(part) for part in (state.count, state.mu, state.nu))
        each = [adam.update(g, optax.ScaleByAdamState(*own)) for g, *own in zip(leaves, *parts, strict=True)]
        updates, states = zip(*each, strict=True) if each else ((), ())
        whole = [jax.tree.unflatten(structure, part) for part in (updates, *zip(*states, strict=True))]
        return whole[0], optax.ScaleByAdamState(*whole[1:])

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


Optimizer = Sgd | Adam | AdamL2 | AdamW | Lamb | Lans | ByPath
