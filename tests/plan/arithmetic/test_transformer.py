"""Parameters and FLOPs against published counts, logs of other projects, and the traced program of our own model."""

import dataclasses

import pytest

from scalejax.models.llm import llama3
from scalejax.plan.arithmetic import published_runs as runs
from scalejax.plan.arithmetic.transformer import Decoder

TINY = Decoder(layers=3, dim=16, hidden=24, heads=4, kv_heads=2, head_dim=6, vocabulary=32)


@pytest.mark.parametrize(
    ("decoder", "count"),
    [
        (runs.LLAMA31_8B, 8_030_261_248),
        (runs.LLAMA31_70B, 70_553_706_496),
        (runs.LLAMA31_405B, 405_853_388_800),
        (runs.LLAMA2_70B, 68_976_648_192),  # the checkpoint of Hugging Face, index of its safetensors
        (runs.MIXTRAL_8X7B, 46_702_792_704),
        # Llama 3.2 1B, whose head is its embedding.
        (
            Decoder(layers=16, dim=2048, hidden=8192, heads=32, kv_heads=8, head_dim=64, vocabulary=128_256, tied=True),
            1_235_814_400,
        ),
    ],
)
def test_parameter_counts_are_the_published_ones(decoder, count):
    assert decoder.parameters == count


def test_a_token_of_mixtral_meets_two_experts_of_eight():
    # "12.9B active parameters", section 2 of arXiv 2401.04088.
    mixtral = runs.MIXTRAL_8X7B
    idle = (
        mixtral.layer_parameters["gate_up"]
        + mixtral.layer_parameters["down"]
        - sum(mixtral.product_flops()[name] // 2 for name in ("gate_up", "down"))
    )
    assert mixtral.parameters - mixtral.layers * idle == pytest.approx(12.9e9, rel=0.003)


@pytest.mark.parametrize(
    ("decoder", "sequence", "tflops", "tokens"),
    [  # TFLOP/s and tokens/s of one line of a log, tpu-recipes
        (runs.LLAMA31_8B, 8192, 417.397, 7207.336),
        (runs.LLAMA31_70B, 8192, 462.297, 960.248),
        (runs.LLAMA31_405B, 8192, 392.454, 149.482),
        (runs.LLAMA2_70B, 4096, 402.274, 905.021),
        (runs.MIXTRAL_8X7B, 4096, 302.311, 3645.203),
        (runs.MIXTRAL_8X22B, 4096, 332.463, 1326.307),
    ],
)
def test_flops_of_a_token_are_those_of_published_logs_when_all_pairs_count(decoder, sequence, tflops, tokens):
    assert decoder.model_flops_per_token(sequence, attention="full") / 1e12 == pytest.approx(tflops / tokens, rel=1e-4)


@pytest.mark.parametrize("attention", ["causal", "full"])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("size", ["3.2-1b", "3.1-8b", "3.1-405b"])
def test_our_model_counts_alike(size, window, attention):
    config = dataclasses.replace(llama3.SIZES[size], window=window)
    decoder = Decoder(
        layers=config.layers,
        dim=config.dim,
        hidden=config.ffn_dim,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.width,
        vocabulary=config.vocabulary,
        tied=config.tie_embeddings,
        window=window,
    )
    assert decoder.parameters == config.parameters()
    assert decoder.model_flops_per_token(4096, attention=attention) == config.flops_per_token(4096, attention)


def test_causal_attention_is_half_of_all_pairs_and_the_rest_is_alike():
    # 12 L S H D FLOPs a token for all pairs: two products forward, four backward.
    full = TINY.model_flops_per_token(64, attention="full")
    assert full - TINY.model_flops_per_token(64, attention="causal") == 6 * 3 * 64 * 4 * 6
    matrices = 3 * (16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24) + 16 * 32
    assert full == 6 * matrices + 12 * 3 * 64 * 24


@pytest.mark.parametrize(
    ("change", "match"),
    [({"layers": 0}, "layers must be"), ({"kv_heads": 3}, "divide heads"), ({"active_experts": 2}, "at most experts")],
)
def test_dimensions_that_make_no_model_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(TINY, **change)
