"""Shape priors by pairwise comparison: a U-Net that compares its picture with a template whose mask is known.

    scalejax train pairwise

Paper: C. Xie et al., "Learning Shape Priors by Pairwise Comparison for Robust Semantic Segmentation", 2022 (arXiv
2204.11090). Its body was not at hand: what follows is built from the abstract, and every choice is a field. In the
order of the code (x picture, y template, s_k its mask of class k > 0, l level, i and j pixels):

    F_l     = encoder(stem(x))
    G_l     = encoder'(stem'(concat(y, y s_1, ..., y s_K)))            encoder' is the same one, or another
    P_k     = sum_j s_k(j) G(j) / sum_j s_k(j)                         s averaged over the pixels that a pixel covers
    A_k(i)  = cos(F(i), P_k)                                           "prototype"
              max_j or mean_j of s_k(j) cos(F(i), G(j))                "dense"; the mean is over the mask
    F'      = 1 x 1 convolution of concat(F, A_1 .. A_K, sum_k softmax_k(A_k / tau) P_k)
    logits  = the decoder of a U-Net on F'

cos(a, b) = a b / (sqrt(|a|^2 + eps) sqrt(|b|^2 + eps)). A class that the template lacks has A_k = -1 and P_k = 0, and
no gradient. The template is read by itself: `read` once, `compare` with any number of pictures.

Baselines are values of one field, `comparison`: "concatenation" leaves the attention out (F' of concat(F, G)), "early"
gives a plain U-Net the template and its masks as input channels, "none" is the plain U-Net.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scalejax import nn
from scalejax.data.images import pairs
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.models.vision.inputs import standardized
from scalejax.models.vision.segmentation import SegmentationSettings, SegmentationTask, averaged
from scalejax.models.vision.unet import Layer, UNetConfig, UNetDecoder, UNetEncoder, check_sizes
from scalejax.nn.norm import Purpose
from scalejax.numerics.dtypes import FLOAT32, Dtypes
from scalejax.parallel.mesh import put, replicated
from scalejax.train.task import Batch, Field

Attention = Literal["prototype", "dense"]
Comparison = Literal["attention", "concatenation", "early", "none"]
EPS = 1e-6
"""Inside both norms of a cosine."""
ABSENT = -1.0
"""Attention to a class that the template lacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Templates:
    """What pictures are compared with.

    Attributes:
      at_test: "one" = one template; "nearest" = of `count` the one whose picture is most like the target, see
        `data.images.pairs.alike`; "ensemble" = the mean of the probabilities by all `count`. They come from the
        training split, evenly spaced.
      count: Candidates, or members.
      row: Of the training split, the one template; None = that with the most classes, and then the most pixels of them.
      alike: In training a template is drawn among so many pictures of other subjects that are most like the target;
        None = among all.
    """

    at_test: Literal["one", "nearest", "ensemble"] = "nearest"
    count: int = 8
    row: int | None = None
    alike: int | None = None

    def __post_init__(self) -> None:
        check_one_of("Templates: at_test", self.at_test, ("one", "nearest", "ensemble"))
        check_at_least("Templates: count", self.count, 1)
        if self.alike is not None:
            check_at_least("Templates: alike", self.alike, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairwiseUNetConfig:
    """Architecture, and where templates come from.

    Attributes:
      unet: Both encoders and the decoder.
      comparison: See the file.
      share: Whether one encoder reads pictures and templates behind stems of their own.
      attention: Of each level, the finest first; None = "dense" at the deepest, "prototype" at the others.
      dense: What a dense attention takes of the pixels of a class.
      reads: What the template's encoder sees beside its picture: the picture inside of each class, or the masks.
      temperature: tau.
      templates: In training and in tests.
    """

    unet: UNetConfig = UNetConfig()
    comparison: Comparison = "attention"
    share: Literal["all_but_stem", "none"] = "all_but_stem"
    attention: tuple[Attention, ...] | None = None
    dense: Literal["max", "mean"] = "max"
    reads: Literal["masked_pictures", "masks"] = "masked_pictures"
    temperature: float = 0.1
    templates: Templates = Templates()

    FREE = ("templates",)

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "comparison": get_args(Comparison),
            "share": ("all_but_stem", "none"),
            "dense": ("max", "mean"),
            "reads": ("masked_pictures", "masks"),
        }
        for name, allowed in choices.items():
            check_one_of(f"PairwiseUNetConfig: {name}", getattr(self, name), allowed)
        for kind in self.attention or ():
            check_one_of("PairwiseUNetConfig: attention", kind, get_args(Attention))
        if self.attention is not None and len(self.attention) != len(self.unet.widths):
            raise UserError(
                f"PairwiseUNetConfig: attention must name one of {', '.join(get_args(Attention))} for each of the "
                f"{len(self.unet.widths)} levels of unet.widths; got {self.attention}."
            )
        if self.temperature <= 0:
            raise UserError(f"PairwiseUNetConfig: temperature must be above 0; got {self.temperature}.")

    @property
    def segmentation(self) -> SegmentationSettings:
        """Loss and scores."""
        return self.unet.segmentation

    @property
    def inputs(self) -> tuple[str, ...]:
        """Fields that the model takes."""
        return ("images",) if self.comparison == "none" else ("images", "template_images", "template_masks")

    @property
    def levels(self) -> tuple[Attention, ...]:
        """The attention of each level."""
        return self.attention or ("prototype",) * (len(self.unet.widths) - 1) + ("dense",)

    def task(self, schema: ImageSchema) -> SegmentationTask:
        """Binds the model to the pictures of a data set.

        Raises:
          UserError: as `UNetConfig.task`.
        """
        check_sizes(schema, len(self.unet.widths))
        kind = SegmentationTask if self.comparison == "none" else PairwiseTask
        return kind(config=self, schema=schema)

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> "PairwiseUNet":
        """The model."""
        return PairwiseUNet(self, schema, rngs, dtypes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReadTemplate:
    """What is known of T templates; a picture is compared with one, so that T is its batch or 1.

    Attributes:
      prototypes: P of each level, float[T, K, C].
      present: Which classes a template has, bool[T, K].
      pixels: Of dense levels (G, s), float[T, J, C] and float[T, J, K], of others None; with
        comparison="concatenation" of all levels G alone, as [T, h, w, C].
      inputs: What the template's encoder has read, float[T, H, W, channels].
    """

    prototypes: tuple[jax.Array, ...]
    present: jax.Array
    pixels: tuple[tuple[jax.Array, jax.Array] | None, ...]
    inputs: jax.Array


def prototypes(features: jax.Array, masks: jax.Array) -> jax.Array:
    """P_k: float[T, J, C] and masks float[T, J, K] to float[T, K, C], 0 where a mask is empty."""
    mass = masks.sum(1)[..., None]  # T K 1
    return jnp.einsum("tjk,tjc->tkc", masks, features) / jnp.where(mass > 0, mass, 1)


def unit(x: jax.Array) -> jax.Array:
    """x / sqrt(|x|^2 + eps) over the last axis."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + EPS)


def prototype_attention(features: jax.Array, means: jax.Array, present: jax.Array) -> jax.Array:
    """A_k(i), float[B, I, K], of F float[B, I, C] and P float[B, K, C]; `present` bool[B, K]."""
    cosines = jnp.einsum("bic,bkc->bik", unit(features), unit(means))
    return jnp.where(present[:, None], cosines, ABSENT)


def dense_attention(
    features: jax.Array, template: jax.Array, masks: jax.Array, reduce: Literal["max", "mean"]
) -> jax.Array:
    """A_k(i), float[B, I, K], of F float[B, I, C], G float[B, J, C] and s float[B, J, K]."""
    cosines = jnp.einsum("bic,bjc->bij", unit(features), unit(template))
    mass = masks.sum(1)[:, None]  # B 1 K
    if reduce == "mean":
        found = jnp.einsum("bij,bjk->bik", cosines, masks) / jnp.where(mass > 0, mass, 1)
    else:
        # One class at a time: I x J x K numbers would be K times as many. The place of the maximum is found apart from
        # its value: what `max` does for its gradient is not safe (see `unet.halved`).
        of_class = []
        for mask in jnp.moveaxis(masks, -1, 0):
            scores = jnp.where(mask[:, None] > 0, mask[:, None] * cosines, -jnp.inf)
            best = jax.lax.stop_gradient(scores).argmax(-1)[..., None]
            of_class.append(jnp.take_along_axis(mask[:, None] * cosines, best, 2)[..., 0])
        found = jnp.stack(of_class, -1)
    return jnp.where(mass > 0, found, ABSENT)


class Fusion(nnx.Module):
    """The 1 x 1 convolution of concat(F, A, sum_k softmax_k(A_k / tau) P_k), or of concat(F, G).

    The last part is the softmax times the K products of P_k: the sum and the convolution change places.
    """

    def __init__(self, width: int, others: int, rngs: nnx.Rngs, dtypes: Dtypes):
        rows = width + others
        self.kernel = nnx.Param(
            nn.scaled_normal(rngs.params(), (rows, width), fan_in=rows, gain=1.0, dtype=dtypes.params),
            logical_axes=("input", "hidden"),
        )
        self.bias = nnx.Param(jnp.zeros(width, dtypes.params), logical_axes=("hidden",))

    def parts(self, *sizes: int) -> list[jax.Array]:
        """The rows for each part of what is concatenated."""
        return jnp.split(self.kernel[...], np.cumsum(sizes)[:-1].tolist())


class PairwiseUNet(nnx.Module):
    """See the file."""

    def __init__(self, config: PairwiseUNetConfig, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes = FLOAT32):
        unet, structures = config.unet, len(schema.classes) - 1
        per_class = schema.channels if config.reads == "masked_pictures" else 1
        read = schema.channels + structures * per_class
        early = read if config.comparison == "early" else 0
        self.stem = Layer(schema.channels + early, unet.widths[0], unet, rngs, dtypes)
        self.encoder = UNetEncoder(unet, rngs, dtypes)
        self.decoder = UNetDecoder(unet, structures + 1, rngs, dtypes)
        reads = config.comparison in ("attention", "concatenation")
        self.template_stem = Layer(read, unet.widths[0], unet, rngs, dtypes) if reads else None
        self.template_encoder = UNetEncoder(unet, rngs, dtypes) if reads and config.share == "none" else None
        beside = structures if config.comparison == "attention" else 0
        fusions = [Fusion(width, width + beside, rngs, dtypes) for width in unet.widths if reads]
        self.fusions = nnx.List(fusions) if reads else None
        self.config, self.schema, self.dtypes = config, schema, dtypes

    def __call__(
        self, images: jax.Array, *template: jax.Array, purpose: Purpose = "evaluation"
    ) -> tuple[jax.Array, ...]:
        """Logits of pictures, each beside a template of its own.

        Args:
          images: Stored pixels [B, H, W, C].
          template: Stored pixels [B, H, W, C] and labels int32[B, H, W]; nothing with comparison="none".
          purpose: Of the pass.
        Returns:
          float[B, H / 2^l, W / 2^l, K + 1] of each head, the finest first.
        """
        if self.config.comparison == "none":
            x = self.stem(standardized(images, self.schema, self.dtypes), purpose)
            return self.decoder(self.encoder(x, purpose), purpose)
        return self.compare(images, self.read(*template, purpose=purpose), purpose=purpose)

    def read(self, images: jax.Array, masks: jax.Array, *, purpose: Purpose = "evaluation") -> ReadTemplate:
        """Reads templates, stored pixels [T, H, W, C] and labels int32[T, H, W]."""
        pictures = standardized(images, self.schema, self.dtypes)
        inside = jax.nn.one_hot(masks, len(self.schema.classes), dtype=pictures.dtype)[..., 1:]  # T H W K
        regions = inside
        if self.config.reads == "masked_pictures":
            regions = (pictures[..., None, :] * inside[..., None]).reshape(*masks.shape, -1)  # T H W KC
        inputs = jnp.concatenate([pictures, regions], -1)
        present = inside.any((1, 2))
        if self.template_stem is None:
            return ReadTemplate((), present, (), inputs)
        encoder = self.template_encoder or self.encoder
        features = encoder(self.template_stem(inputs, purpose), purpose)
        if self.config.comparison == "concatenation":
            return ReadTemplate((), present, tuple((x, x[..., :0]) for x in features), inputs)
        means, pixels = [], []
        for kind, x in zip(self.config.levels, features, strict=True):
            wide = nn.wide(x.dtype)
            g, s = (
                y.astype(wide).reshape(len(y), -1, y.shape[-1])
                for y in (x, averaged(inside.astype(wide), masks.shape[1] // x.shape[1]))
            )
            means.append(prototypes(g, s))
            pixels.append((g, s) if kind == "dense" else None)
        return ReadTemplate(tuple(means), present, tuple(pixels), inputs)

    def compare(
        self, images: jax.Array, template: ReadTemplate, *, purpose: Purpose = "evaluation"
    ) -> tuple[jax.Array, ...]:
        """Logits of pictures [B, H, W, C] beside templates that were read, one for all or one for each."""
        if len(template.inputs) != len(images):
            template = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(images), *x.shape[1:])), template)
        x = standardized(images, self.schema, self.dtypes)
        if self.config.comparison == "early":
            x = jnp.concatenate([x, template.inputs], -1)
        features = self.encoder(self.stem(x, purpose), purpose)
        if self.fusions is not None:
            fuse = self._attended if self.config.comparison == "attention" else self._concatenated
            features = [fuse(level, x, template) for level, x in enumerate(features)]
        return self.decoder(features, purpose)

    def attention(self, level: int, features: jax.Array, template: ReadTemplate) -> jax.Array:
        """A of a level, float[B, I, K], in float32 or wider, of its features [B, h, w, C]."""
        x = features.astype(nn.wide(features.dtype)).reshape(len(features), -1, features.shape[-1])
        pixels = template.pixels[level]
        if pixels is None:
            return prototype_attention(x, template.prototypes[level], template.present)
        return dense_attention(x, *pixels, self.config.dense)

    def _attended(self, level: int, features: jax.Array, template: ReadTemplate) -> jax.Array:
        assert self.fusions is not None
        scores, means = self.attention(level, features, template), template.prototypes[level]
        likely = jax.nn.softmax(scores / self.config.temperature)
        fusion = self.fusions[level]
        _, structures, width = means.shape
        own, of_scores, of_means = fusion.parts(width, structures, width)
        dtype = self.dtypes.compute
        small = scores @ of_scores.astype(scores.dtype)
        small += jnp.einsum("bik,bkc->bic", likely, means @ of_means.astype(means.dtype))
        y = features @ own.astype(dtype) + small.astype(dtype).reshape(*features.shape[:3], width)
        return y + fusion.bias[...].astype(dtype).reshape(1, 1, 1, -1)

    def _concatenated(self, level: int, features: jax.Array, template: ReadTemplate) -> jax.Array:
        assert self.fusions is not None
        pixels, fusion, dtype = template.pixels[level], self.fusions[level], self.dtypes.compute
        assert pixels is not None
        own, others = fusion.parts(*(features.shape[-1],) * 2)
        y = features @ own.astype(dtype) + pixels[0] @ others.astype(dtype)
        return y + fusion.bias[...].astype(dtype).reshape(1, 1, 1, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairwiseTask(SegmentationTask):
    """Pictures to masks beside templates.

    In training a picture has a template of another subject in its batch. Evaluations read the templates of
    `Templates.at_test` once a batch; "template_weights" says which of them a picture is compared with.
    """

    config: PairwiseUNetConfig

    def fields(self) -> dict[str, object]:
        """Those of a segmentation, a template, and the weights of templates in evaluations."""
        own = dict(super().fields())
        return own | {
            "template_images": own["images"],
            "template_masks": own["masks"],
            "template_weights": Field(shape=(self._count,), dtype="float32"),
        }

    @property
    def _count(self) -> int:
        # Where a picture must not be its own template there is another.
        return 2 if self.config.templates.at_test == "one" else self.config.templates.count

    def train_batches(self, data: ImageDataSet, mesh: Mesh, start_example: int) -> Iterator[object]:
        """Batches with templates."""
        del mesh
        found = pairs.Pairs(data, alike=self.config.templates.alike).train_batches(
            start_example=start_example, process_index=jax.process_index(), process_count=jax.process_count()
        )
        for batch in found:
            yield batch | {"template_weights": np.zeros((len(batch["weights"]), self._count), np.float32)}

    def eval_batches(self, data: ImageDataSet, mesh: Mesh, split: str) -> Iterator[object]:
        """Batches with weights of templates, and none in the place of their own."""
        del mesh
        chosen = self._candidates(data)
        for batch in data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count()):
            yield batch | {
                "template_images": np.zeros_like(batch["images"]),
                "template_masks": np.zeros_like(batch["masks"]),
                "template_weights": chosen.weights(batch, self.config.templates.at_test),
            }

    def constants(self, data: ImageDataSet, mesh: Mesh) -> object:
        """The templates of evaluations, on every device."""
        return put(self._candidates(data).arrays, replicated(mesh))

    def abstract_constants(self, data: ImageDataSet, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Their shapes."""
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated(mesh))
            for name, array in self._candidates(data).arrays.items()
        }

    def _candidates(self, data: ImageDataSet) -> pairs.Candidates:
        templates = self.config.templates
        if templates.at_test == "one":
            return pairs.Candidates.first(data, templates.row)
        return pairs.Candidates.spaced(data, templates.count)

    def segment(self, model: PairwiseUNet, batch: Batch) -> Sequence[jax.Array]:
        """Logits; in evaluations of an ensemble logarithms of mean probabilities."""
        if batch.purpose != "evaluation":
            return super().segment(model, batch)
        images, weights = batch["images"], batch["template_weights"]
        known = model.read(batch.constants["images"], batch.constants["masks"])
        if self.config.templates.at_test != "ensemble":
            rows = weights.argmax(-1)
            return model.compare(images, jax.tree.map(lambda x: x[rows], known))
        total: Any = 0.0
        for member in range(self._count):
            one = jax.tree.map(lambda x, m=member: x[m : m + 1], known)
            share = weights[:, member].reshape(-1, 1, 1, 1)
            found = [share.astype(x.dtype) * jax.nn.softmax(x) for x in model.compare(images, one)]
            total = found if member == 0 else jax.tree.map(jnp.add, total, found)
        return [jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).tiny)) for x in total]
