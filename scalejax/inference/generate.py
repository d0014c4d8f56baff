"""Continues token sequences with a language model on the devices of a mesh.

Prompts go through a loop with a cache of pages (`loop.Scheduler`), which the programs of `programs` read and fill.

A run that was trained under rules for number formats is served under them: its products and rows are those of its
evaluation. A folder with static scales of activations is served with activations that are quantized under these.

On a mesh, parameters lie as the rules say (heads, hidden features and vocabulary over `tensor`), rows of the batch over
the batch axes, and tokens of a row over `context` (Yang et al. 2025, arXiv 2411.01783).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax import nn, units
from scalejax.errors import UserError, check_at_least
from scalejax.inference import packed_params, static_inputs
from scalejax.inference.loop import BLOCK_S, Scheduler, bucket, make_loop
from scalejax.inference.programs import Programs
from scalejax.inference.requests import Request
from scalejax.inference.sampling import GREEDY, TokenSampling
from scalejax.models.llm import loading
from scalejax.models.llm.architecture import LanguageConfig
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.nn import counts
from scalejax.numerics.quantized.rules import QuantizationRule, assign
from scalejax.numerics.quantized.weights import weights_of
from scalejax.parallel import mesh as meshes
from scalejax.parallel.rules import LLM, Rules
from scalejax.train.state import ModelShape, Params

_PAGE = 64

Ended = Literal["stop", "length"]
Weights = Literal["packed", "decoded"]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What was generated for one prompt.

    Attributes:
      tokens: The new tokens, without the one that ended them.
      ended: "stop": by a stop token; "length": there were as many as asked for.
      reused: Tokens of the prompt that were not read for it, as the cache had them.
    """

    tokens: tuple[int, ...]
    ended: Ended
    reused: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A model on devices that continues sequences.

    Attributes:
      config: Architecture.
      shape: Structure of the model.
      params: Its parameters by path; quantized ones may be packed, see `packed_params`, and know the static scales of
        what they multiply, see `static_inputs`.
      mesh: The devices.
      choices: Ids below this may be generated; None = all. A table may have more rows than the tokenizer has ids.
      formats: {path of a module: the rule of its number formats}.
    """

    config: LanguageConfig
    shape: ModelShape
    params: Params
    mesh: Mesh
    choices: int | None = None
    formats: Mapping[str, QuantizationRule] = dataclasses.field(default_factory=dict)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: TokenSampling = GREEDY,
        stop: Sequence[int] = (),
        samples: Sequence[int] | None = None,
        progress: Callable[[list[list[int]]], bool] | None = None,
        loop: Scheduler | None = None,
    ) -> list[Continuation]:
        """Continues each prompt.

        Which tokens a prompt is continued with depends on it, the sampling and its sample number; on the rest of the
        batch only so far as the number of rows and the longest of them, which choose the programs, may change the last
        bit of a logit.

        Args:
          prompts: Token ids, at least one each; equal ones share what is read of them.
          max_tokens: New tokens of each, at most.
          sampling: How they are chosen.
          stop: A row ends where one of these comes, which is not part of the result.
          samples: A number for each prompt; draws of different numbers are independent. None = 0 for all.
          progress: Told the new tokens of all rows so far, after each step; returns whether to go on. With it a step
            has as many tokens as fit `loop.BLOCK_S`.
          loop: Where they run, idle now; what it has of the prompts already is not read again. None = one of their own.

        Raises:
          UserError: a prompt is empty, holds an id outside the vocabulary, or is longer, with what is to come, than the
            model is meant for; the cache does not fit; or logits are not finite.
        """
        if not prompts:
            return []
        self.check(prompts, max_tokens)
        numbers = [0] * len(prompts) if samples is None else list(samples)
        if len(numbers) != len(prompts):
            raise ValueError(f"generate: samples must have one number a prompt, {len(prompts)}; got {len(numbers)}.")
        if loop is not None and loop.engine is not self:
            raise UserError("loop: the session belongs to another model. Give one that was made of this engine.")
        loop = loop or self._loop_for(prompts, max_tokens, math.inf if progress is None else BLOCK_S)
        rows: dict[tuple[int, int], list[int]] = {}
        of_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            of_prompt.setdefault(tuple(prompt), []).append(row)
        for prompt, its in of_prompt.items():
            wanted: dict[int, list[int]] = {}
            for row in its:
                wanted.setdefault(numbers[row], []).append(row)
            request = Request(prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop=tuple(stop))
            request_number = loop.submit_samples(request, [*wanted])
            rows |= {(request_number, sample): some for sample, some in wanted.items()}
        out: list[list[int]] = [[] for _ in prompts]
        ended: list[Ended] = ["length"] * len(prompts)
        reused = [0] * len(prompts)
        try:
            while loop.busy:
                chunks = loop.step()
                for chunk in chunks:
                    for row in rows[chunk.request, chunk.sample]:
                        out[row] += chunk.tokens
                        reused[row] = chunk.reused
                        if chunk.ended == "error":
                            raise UserError(f"prompt {row + 1}: {chunk.message}")
                        ended[row] = chunk.ended or ended[row]
                if progress is not None and chunks and not progress(out):
                    break
        finally:
            for request_number in {number for number, _ in rows}:
                loop.cancel(request_number)
        return [Continuation(tuple(new), end, had) for new, end, had in zip(out, ended, reused, strict=True)]

    def _loop_for(self, prompts: Sequence[Sequence[int]], max_tokens: int, block_s: float) -> Scheduler:
        """With slots and units for all prompts at once."""
        groups = self.programs.groups
        ranks = self.programs.ranks
        slots = groups * bucket(-(-len(prompts) // groups))
        lengths = sorted((len(prompt) + max_tokens for prompt in prompts), reverse=True)
        # Each group has as many as the longest of a share of the rows need.
        unit = ranks * _PAGE
        units = bucket(sum(-(-length // unit) for length in lengths[: slots // groups]))
        return make_loop(self, slots=slots, kv_tokens=units * groups * unit, page=_PAGE, block_s=block_s)

    def logits(self, tokens: np.ndarray) -> jax.Array:
        """Of the next token at every position: int32[B, S] -> wide[B, S, V]; each row is a document.

        Raises:
          UserError: rows are longer than the model is meant for.
        """
        if tokens.shape[1] > self.config.max_positions:
            raise UserError(
                f"a row has {tokens.shape[1]:,} tokens, but the model is meant for at most "
                f"{self.config.max_positions:,} positions. Cut the text into shorter rows."
            )
        return self.programs.forward(self.params, np.asarray(tokens, np.int32))

    def score(self, params: Params, tokens: jax.Array, counts: jax.Array | None = None) -> jax.Array:
        """The same inside a program, of its parameters: wide[B, S, V], or wide[B, V] after the first counts[b] tokens.

        Args:
          params: In the place of those of this.
          tokens: int32[B, S].
          counts: int32[B], at least 1; None = of all positions.

        Raises:
          UserError: the model cannot do without later tokens.
        """
        model, gather = self.programs.model(params), self.programs.gather
        if counts is not None and self.programs.ranks == 1:
            reading = nn.Reading.whole((tokens.shape[0], tokens.shape[1]), counts, _PAGE)
            return model.extend(tokens, reading, model.cache(nn.PageShape(reading.table.size, _PAGE)), gather=gather)[0]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        logits = model(tokens, positions, jnp.ones_like(tokens), gather=gather)
        return logits if counts is None else jnp.take_along_axis(logits, counts[:, None, None] - 1, axis=1)[:, 0]

    @property
    def programs(self) -> Programs:
        """What runs on the devices."""
        return self._programs

    @functools.cached_property
    def _programs(self) -> Programs:
        return Programs(self.config, self.shape, self.mesh, self.choices, self.formats)

    @property
    def held_bytes(self) -> int:
        """Of the parameters on each device."""
        return sum(self.device_bytes(p, p.sharding) for p in jax.tree.leaves(self.params))

    @staticmethod
    def device_bytes(array: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> int:
        """Of an array on each device."""
        return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize

    def check_memory(self, needed: int, what: str) -> None:
        """Refuses what cannot be on a device, before anything is compiled.

        Raises:
          UserError: says what would be needed and what there is.
        """
        _check_memory(self.mesh, needed, what)

    def check(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, least: int = 1) -> None:
        """Refuses prompts that `generate` would refuse, whatever the batch.

        Raises:
          UserError: names the first by its number, from 1.
        """
        check_at_least("max_tokens", max_tokens, least)
        vocabulary = self.config.vocabulary
        assert vocabulary is not None
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(
                    f"prompt {number + 1} is empty, and its tokenizer has no token to begin with. Add text."
                )
            outside = [token for token in prompt if not 0 <= token < vocabulary]
            if outside:
                raise UserError(
                    f"prompt {number + 1} has token {outside[0]}, but the model's vocabulary is 0 to {vocabulary - 1}. "
                    "Take the tokenizer that belongs to the model."
                )
            if len(prompt) + max_tokens > self.config.max_positions:
                raise UserError(
                    f"prompt {number + 1} has {len(prompt):,} tokens, and {max_tokens:,} more make "
                    f"{len(prompt) + max_tokens:,}: the model is meant for at most {self.config.max_positions:,} "
                    "positions. Shorten the prompt, or ask for fewer tokens."
                )


def load(
    model: LanguageModel,
    mesh: Mesh,
    *,
    dtype: DTypeLike | None = None,
    weights: Weights = "packed",
    rules: Rules = LLM,
    choices: int | None = None,
    loaded: Callable[[int], None] = lambda _: None,
) -> Engine:
    """Puts a model on the devices of a mesh.

    Args:
      model: Opened.
      mesh: The devices.
      dtype: Of the parameters, activations and products; None = that of the parameters as stored.
      weights: What becomes of quantized ones: "packed" = they stay so where they can (see `packed_params`) and are
        decoded each time that they are used; "decoded" = once, when they are loaded.
      rules: Logical axis of a parameter -> mesh axes.
      choices: See `Engine`.
      loaded: Told the bytes of every tensor that is loaded.

    Raises:
      UserError: it does not fit the devices, cannot be read, or the mesh cuts layers.
    """
    if (stages := mesh.shape["stage"]) > 1:
        raise UserError(
            f"mesh: generation spreads over tensor, context, fsdp, replica and expert, not over stage={stages}. Give "
            f"these devices to tensor: --mesh tensor={stages}."
        )
    dtype = model.dtype if dtype is None else dtype
    family = model.architecture
    abstract = counts.abstract(family.build, model.config, dtypes=nn.Dtypes(dtype, dtype))
    assert isinstance(abstract, nnx.Module)
    shape = ModelShape.of(abstract)
    formats = assign(model.quantization, weights_of(shape.logical_axes))
    shardings = shape.shardings(mesh, rules)
    targets = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[name]) for name, p in shape.params.items()
    }
    for name, v in shape.variables.items():  # whole on every device, as in training
        targets[name] = jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, P()))
    packed = packed_params.choose_packed(model.source, targets) if weights == "packed" else {}
    needed = sum(Engine.device_bytes(p, p.sharding) for name, p in targets.items() if name not in packed)
    needed += sum(packed_params.nbytes(parts) for _, parts in packed.values())
    _check_memory(mesh, needed, "the parameters")
    params: dict[str, Any] = {}  # arrays, and weights in the place of some
    if packed:
        params, targets = packed_params.load(model.source, targets, loaded=loaded)
    params |= loading.load(model.source, targets, loaded=loaded)
    if model.inputs:
        entries = {entry.path: entry for entry in family.entries(model.config)}
        params = static_inputs.attach(params, entries, family.sizes(model.config), model.inputs, mesh)
    engine = Engine(model.config, shape, params, mesh, choices, formats)
    for name in shape.params:
        wanted = engine.programs.format(name, shardings[name])
        if isinstance(wanted, Format) and isinstance(params[name], jax.Array):
            # One by one, so that no more than one is there twice.
            params[name] = jax.device_put(params[name], wanted, donate=True)
    return engine


def _check_memory(mesh: Mesh, needed: int, what: str) -> None:
    limit = meshes.device_memory_bytes(mesh)
    if limit is not None and needed > limit:
        raise UserError(
            f"{what} need {units.size(needed)} on each device, and it has {units.size(limit)}. Spread the model over "
            "more devices (--mesh tensor=N), choose a narrower --dtype, or generate fewer rows or tokens at a time."
        )
