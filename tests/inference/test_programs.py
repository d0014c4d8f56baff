"""The programs of an engine, as they are compiled."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from llama_cases import GQA

from scalejax import nn
from scalejax.inference.programs import Programs
from scalejax.models.llm.llama3 import Llama
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape


def test_scores_of_prompts_never_hold_the_logits_of_all_positions():
    config = dataclasses.replace(GQA, layers=1, vocabulary=16_384, max_positions=1024)
    shape = ModelShape.of(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0), nn.Dtypes(jnp.float32, jnp.float32))))
    programs = Programs(config, shape, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]), None, {})
    all_logits = 4 * 1024 * 16_384
    assert programs.likelihood_bytes(shape.params, 1, 1024) < all_logits / 2
    assert programs.likelihood_bytes(shape.params, 4, 256) < all_logits / 2
