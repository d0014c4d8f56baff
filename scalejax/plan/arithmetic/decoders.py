"""An experiment with a decoder, as the step model sees it: dimensions, and how it is trained on a mesh."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.mesh import AXES, BATCH_AXES, MeshShape
from scalejax.plan.arithmetic.step_model import REMATS, Remat, Training
from scalejax.plan.arithmetic.transformer import Decoder, Pairs

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment


@runtime_checkable
class ExpertPart(Protocol):
    """An MLP of a `DecoderConfig` that sends tokens to some of many; `models.llm.experts.Experts` is one."""

    @property
    def count(self) -> int:
        """Experts of a layer."""
        ...

    @property
    def active(self) -> int:
        """Experts that see a token, in the mean."""
        ...

    @property
    def routers(self) -> int:
        """Routers of a layer, of which a token passes one."""
        ...

    def capacity(self, length: int, shards: int) -> float | None:
        """Room of an expert over an even share of the tokens, all of which is computed; None = for all that come.

        Args:
          length: Positions of a row.
          shards: Devices among which the tokens of a batch are divided.
        """
        ...

    def exchange(self, devices: int) -> float:
        """Where there is room for all that come: places that travel between devices over what tokens choose.

        Args:
          devices: Over which the experts lie.
        """
        ...

    @property
    def keeps_products(self) -> bool:
        """Whether the policy "dots" finds their products."""
        ...


@runtime_checkable
class DecoderConfig(Protocol):
    """What the configuration of a model must have to be planned as a decoder; `LlamaConfig` has it.

    It is a dataclass: `dataclasses.replace` changes `layers` and `remat`. Its `mlp` may be an `ExpertPart`.
    """

    @property
    def layers(self) -> int: ...

    @property
    def dim(self) -> int: ...

    @property
    def ffn_dim(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def width(self) -> int:
        """Width of a head."""
        ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def tie_embeddings(self) -> bool: ...

    @property
    def remat(self) -> str: ...

    @property
    def loss_positions(self) -> int: ...

    def parameters(self) -> int: ...

    def flops_per_token(self, length: int, attention: Pairs = "causal") -> int: ...


def decoder_of(experiment: "Experiment") -> Decoder:
    """The dimensions of the model of an experiment.

    Raises:
      UserError: they do not describe it, see `find_decoder`.
    """
    found = find_decoder(experiment)
    if found is None:
        if (depth := getattr(experiment.model, "depth", None)) is not None:
            raise UserError(
                f"model.depth is {type(depth).__name__}, whose layers do not all see every token, and arithmetic plans "
                "layers that do. Leave depth out, or take `scalejax plan` without --search, which compiles any model."
            )
        raise UserError(
            "The model must be a decoder such as LlamaConfig, made of its own parts, to be planned by arithmetic; got "
            f"{type(experiment.model).__name__}. `scalejax plan` without --search compiles any model."
        )
    return found


def find_decoder(experiment: "Experiment") -> Decoder | None:
    """The dimensions of the model of an experiment; None = it is no decoder, or has parts that they do not describe."""
    model = experiment.model
    if not isinstance(model, DecoderConfig):
        return None
    bound: Any = dataclasses.replace(model, vocabulary=model.vocabulary or experiment.data.schema().vocabulary)  # pyright: ignore[reportArgumentType, reportCallIssue]
    experts = experts_of(model)
    decoder = Decoder(
        layers=bound.layers,
        dim=bound.dim,
        hidden=bound.ffn_dim,
        heads=bound.heads,
        kv_heads=bound.kv_heads,
        head_dim=bound.width,
        vocabulary=bound.vocabulary,
        tied=bound.tie_embeddings,
        window=getattr(bound, "window", None),
        **(
            {}
            if experts is None
            else {"experts": experts.count, "active_experts": experts.active, "routers": experts.routers}
        ),
    )
    counted = bound.parameters(), bound.flops_per_token(1, "full")
    return decoder if counted == (decoder.parameters, decoder.model_flops_per_token(1, attention="full")) else None


def remats_of(model: object) -> dict[str, Remat]:
    """What is kept of a layer of a `DecoderConfig`, by the choices of `nn.layers.Remat`.

    "dots" is jax's `dots_with_no_batch_dims_saveable`: where experts are a batch dimension of one product, nothing of
    them is kept.
    """
    experts = experts_of(model)
    if experts is None or experts.keeps_products:
        return REMATS
    dots = REMATS["dots"]
    return {**REMATS, "dots": Remat(kept=tuple(name for name in dots.kept if name not in ("gate_up", "down")))}


def experts_of(model: object) -> ExpertPart | None:
    """The experts of the configuration of a model; None = it has none."""
    part = getattr(model, "mlp", None)
    return part if isinstance(part, ExpertPart) else None


def training_of(
    experiment: "Experiment", mesh: MeshShape, devices: int, *, compute_dtype: jax.typing.DTypeLike
) -> Training:
    """How an experiment is trained on a mesh.

    Args:
      experiment: The run; its own mesh is not used.
      mesh: Devices per axis.
      devices: How many there are.
      compute_dtype: Of products and activations, see `train.precision.dtypes_of`.
    """
    model = experiment.model
    assert isinstance(model, DecoderConfig)
    sizes = {axis: count for axis, count in zip(AXES, mesh.resolve(devices), strict=True)}
    schema, strategy, batch = experiment.data.schema(), experiment.strategy, experiment.data.batch_size
    bound = getattr(model, "bound", None)  # parts may want to know more of the data
    experts = experts_of(model if bound is None else bound(schema))
    master, compute = jnp.dtype(experiment.precision.params), jnp.dtype(compute_dtype)
    moved = jnp.dtype(strategy.param_dtype or (compute if strategy.form == "implicit" else master))
    rows = math.prod(sizes[axis] for axis in BATCH_AXES)
    return Training(
        batch=batch,
        sequence=schema.length,
        mesh=mesh,
        remat=remats_of(model)[model.remat],
        capacity_factor=None if experts is None else experts.capacity(schema.length, rows * sizes["context"]),
        exchange_factor=1.0 if experts is None else experts.exchange(sizes["expert"]),
        sharded_over=() if isinstance(strategy, Ddp) else strategy.axes(_abstract_mesh(sizes)),
        reshard="after_forward" if isinstance(strategy, Ddp) or strategy.after_forward == "drop" else "keep",
        parts=meshes.fewest_parts(batch // rows, min(batch // rows, most_rows(experiment))),
        accumulate=strategy.accumulate,
        compute_bytes=compute.itemsize,
        gather_bytes=moved.itemsize,
        reduce_bytes=jnp.dtype(strategy.reduce_dtype or (master if strategy.accumulate == "local" else moved)).itemsize,
        parameter_bytes=master.itemsize,
        gradient_bytes=master.itemsize,
        optimizer_bytes=_optimizer_bytes(experiment, master),
        optimizer_rests="device" if experiment.placement.offload == "none" else "host",
        loss_positions=model.loss_positions,
    )


def most_rows(experiment: "Experiment") -> int:
    """Most examples that a device puts through the model at once; those of a whole batch where none is said."""
    most = experiment.gradients.microbatch
    return most if isinstance(most, int) else experiment.data.batch_size


def with_model(experiment: "Experiment", **fields: Any) -> "Experiment":
    """The experiment with other fields of its model, such as `layers` and `remat`."""
    model: Any = experiment.model
    return dataclasses.replace(experiment, model=dataclasses.replace(model, **fields))


def _optimizer_bytes(experiment: "Experiment", master: np.dtype) -> int:
    """Of the state of one parameter; what does not grow with the parameters (step counters) is left out."""
    from scalejax import optim  # which needs optax

    count, optimizer = 4096, experiment.optimizer
    if isinstance(optimizer, optim.ByPath):
        optimizer = optimizer.rules[-1].optimizer  # that of most parameters
    like = {"weight": jax.ShapeDtypeStruct((count, 1), master)}
    state = jax.eval_shape(optimizer.build(experiment.steps).init, like)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // count


def _abstract_mesh(sizes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
