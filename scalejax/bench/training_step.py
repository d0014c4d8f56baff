"""A training step as a contest: the program that `scalejax train` runs, against a peer's step on the same numbers.

One step is forward, backward, dense Adam and row-wise AdaGrad on the rows that the batch touched. Both sides cycle
through the same batches, which lie on the device already, start from the same parameters, and use the same threads.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import machine, peers, workloads
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.fsdp import Fsdp
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Gradients, Tables
from scalejax.train.protocols import ModelConfig
from scalejax.train.runs import binding
from scalejax.train.step import Program

_CONSTANT = optim.Constant(value=1e-3)
ADAM = optim.Adam(learning_rate=_CONSTANT, eps=1e-6)
"""Above the errors of small gradients, which under an eps of 1e-8 make steps of full length with either sign."""

ROWS = RowwiseAdagrad(learning_rate=0.002)

CHECKED_STEPS = 4
"""Steps after which outputs are compared once more: every optimizer has then used its state."""

FORWARD_TOLERANCE = 2e-5
"""Largest difference of logits that come from equal parameters, over the largest logit: float32 sums of up to a few
thousand products."""

FIRST_STEP_TOLERANCE = 1e-4
"""Mean difference of logits after one step, over the mean size of a logit: now gradients have such errors as well, and
the first steps of Adam and AdaGrad divide by them. Not the largest difference: with 10^5 to 10^8 hidden activations a
few lie so close to 0 that rounding decides whether a ReLU is open, and the rows of such an example then take another
step. Small batches in the tests are held to less."""

TRAINED_TOLERANCE = 2e-3
"""The same after `CHECKED_STEPS`."""

LOSS_TOLERANCE = 1e-4
"""Relative, on the mean loss, always."""


class Peer(Protocol):
    """A training step in another library."""

    def place(self, batch: ClickBatch) -> object: ...

    def step(self, batch: object) -> object:
        """One step, complete when it returns."""
        ...

    def logits(self, batch: object) -> np.ndarray:
        """float32[B]."""
        ...


MakePeer = Callable[[dict[str, np.ndarray], list[np.ndarray]], Peer]
"""(dense parameters by path, rows of each feature's table in the order of the schema) -> a peer that starts there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A data config for batches that are at hand; only its batch size is ever asked for."""

    batch_size: int

    def schema(self) -> NoReturn:
        raise NotImplementedError("the schema of a benchmark comes from the benchmark")

    def build(self) -> NoReturn:
        raise NotImplementedError("the batches of a benchmark come from the benchmark")


def contest(model: ModelConfig, schema: Schema, batches: Sequence[ClickBatch], make_peer: MakePeer | None) -> Contest:
    """The training step of `model` on one device, and the peer's.

    Raises:
      UserError: a peer is asked for on an accelerator.
    """
    device = jax.devices()[0]
    if make_peer is not None:
        check_peer_device(device)
    experiment = Experiment(
        model=model,
        data=Given(batch_size=len(batches[0])),
        steps=1_000_000,
        optimizer=ADAM,
        strategy=Fsdp(sharding="NO_SHARD"),
        tables=Tables(optimizer=ROWS),
        gradients=Gradients(microbatch="cache"),
    )
    built = binding.bind(experiment, schema, meshes.make_mesh(experiment.placement.mesh, [device]))
    ours = _Ours(built, batches)
    alone = Contest(ours.steps, examples=len(batches[0]), device=machine.device_name(device))
    if make_peer is None:
        return alone
    peer = make_peer(ours.parameters(), ours.tables())
    placed = [peer.place(batch) for batch in batches]
    turn = itertools.cycle(placed)
    peer_steps = repeated(lambda: peer.step(next(turn)))

    def check() -> None:
        done = 0
        for steps, tolerance, size in (
            (0, FORWARD_TOLERANCE, np.max),
            (1, FIRST_STEP_TOLERANCE, np.mean),
            (CHECKED_STEPS, TRAINED_TOLERANCE, np.mean),
        ):
            ours.steps(steps - done)
            peer_steps(steps - done)
            done, at = steps, steps % len(batches)
            check_equal(ours.logits(at), peer.logits(placed[at]), batches[at], f"after {steps} steps", tolerance, size)

    return dataclasses.replace(alone, peer=peer_steps, check=check)


def click_contest(
    case: str,
    against: str | None,
    data: pathlib.Path | None,
    models: Mapping[str, ModelConfig],
    module: Callable[[Any, Schema], Any],
) -> Contest:
    """The training step of a click model on flights or, with `case` "criteo", on the shape of Criteo.

    Args:
      case: As in `workloads.for_case`.
      against: "torch", "torch-compile" or None.
      data: Of the user, or None.
      models: The model of each kind of case, "flights" and "criteo".
      module: (model, schema) -> the same in PyTorch.
    """
    schema, batches = workloads.for_case(case, data)
    model = models["criteo" if case == "criteo" else "flights"]

    def peer(parameters: dict[str, np.ndarray], tables: list[np.ndarray]) -> Peer:
        return torch_step(module(model, schema), parameters, tables, against == "torch-compile")

    return contest(model, schema, batches, None if against is None else peer)


def torch_step(module: object, parameters: dict[str, np.ndarray], tables: Sequence[np.ndarray], compiled: bool) -> Peer:
    """A PyTorch module that starts from our parameters and tables, with the optimizers of `contest`."""
    peer = peers.load("torch_training")
    peer.set_parameters(module, peer.from_jax(parameters))
    settings = peer.Settings(
        threads=len(machine.usable_cpus()),
        learning_rate=_CONSTANT.value,
        eps=ADAM.eps,
        row_learning_rate=ROWS.learning_rate,
        row_eps=ROWS.eps,
        compiled=compiled,
    )
    return peer.TrainingStep(module, tables, settings)


def check_peer_device(device: Any) -> None:
    """Refuses a peer on an accelerator.

    Raises:
      UserError: says how to go on.
    """
    if device.platform != "cpu":
        raise UserError(
            f"--against: peers are timed on a CPU, and jax's first device is {device.device_kind}. "
            "Set JAX_PLATFORMS=cpu, or leave --against out to time scalejax alone."
        )


def check_equal(
    ours: np.ndarray,
    peer: np.ndarray,
    batch: ClickBatch,
    when: str,
    tolerance: float,
    size: Callable[[np.ndarray], float] = np.max,
) -> None:
    """Compares logits float32[B] and the losses they give.

    Raises:
      OutputsDiffer: size(differences) is beyond `tolerance` * size(logits), or mean losses beyond `LOSS_TOLERANCE`.
    """
    logits = np.stack([ours, peer]).astype(np.float64)
    if not np.isfinite(logits).all():
        raise OutputsDiffer(f"logits {when} are not finite")
    difference = size(np.abs(logits[0] - logits[1])) / size(np.abs(logits))
    if difference > tolerance:
        raise OutputsDiffer(f"logits {when} differ by {difference:.1e} of their size; {tolerance:.0e} is allowed")
    losses = (np.logaddexp(0, logits) - logits * batch.labels[:, 0]).mean(1)
    if abs(losses[0] - losses[1]) > LOSS_TOLERANCE * losses[1]:
        raise OutputsDiffer(f"mean losses {when} differ: {losses[0]:.7f} here, {losses[1]:.7f} in the peer")


class _Ours:
    """Our side: a program, its state, and the batches on the device."""

    def __init__(self, built: Program, batches: Sequence[ClickBatch]) -> None:
        self._program = built
        self._state = built.init()
        self._batches = [convert.to_device(batch, built) for batch in batches]
        self._turn = itertools.cycle(self._batches)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._state, _ = self._program.train_step(self._state, next(self._turn))
        jax.block_until_ready(self._state)

    def logits(self, index: int) -> np.ndarray:
        return np.asarray(self._program.eval_step(self._state, self._batches[index]).outputs["logits"])[:, 0]

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in self._state.params.items()}

    def tables(self) -> list[np.ndarray]:
        """Rows of the table of each one-hot feature, in the order of the schema."""
        logical = self._program.embeddings.to_logical(self._state.tables)
        table_of = {feature: table.name for table in self._program.task.tables() for feature in table.features}
        return [np.array(logical[table_of[name]]["rows"]) for name in self._program.task.schema.keys]
