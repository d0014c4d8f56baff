"""Serving by arithmetic: closed forms by hand, and a published run."""

import dataclasses
import functools
import json
import math

import pytest
from jax.sharding import AbstractMesh

from scalejax import chips
from scalejax.errors import UserError
from scalejax.inference import abstract_model
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.models.llm.llama3.config import SIZES, LlamaConfig
from scalejax.plan import serving
from scalejax.plan.planner_machines import Gpus
from scalejax.plan.serving import PlannedModel, ServingPlan

SMALL = SIZES["3.1-8b"]
LARGE = SIZES["3.1-405b"]
V5P = chips.V5P


@functools.cache
def arrays(config, context, tensor, kv_dtype, page):
    sizes = {"context": context, "tensor": tensor}
    axes = serving.AXES
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in axes), axes, axis_types=(serving.AxisType.Auto,) * 6)
    return abstract_model.arrays_of(config, mesh, dtype="bfloat16", page=page, kv_dtype=kv_dtype)


def planned(
    config, machine, mesh=None, *, kv_dtype="compute", page=64, slots=1, context=2**17, piece=512
) -> ServingPlan:
    machine = serving.parse_machine(machine) if isinstance(machine, str) else machine
    laid_out = serving.serving_mesh(machine, mesh, config.kv_heads)
    found = arrays(config, laid_out.shape["context"], laid_out.shape["tensor"], kv_dtype, page)
    model = PlannedModel(config, *found, page)
    return serving.plan_serving(model, machine, laid_out, slots=slots, context=context, piece=piece)


@pytest.mark.parametrize(
    ("config", "parameters", "kv"),
    [(SMALL, 8_030_261_248, 131_072), (LARGE, 405_853_388_800, 516_096)],
    ids=["8b", "405b"],
)
def test_published_sizes_have_their_parameters_and_bytes_a_token(config, parameters, kv):
    found = planned(config, "v5p:4x4x4")
    assert found.parameters == parameters
    assert found.kv_bytes_a_token == 2 * config.layers * 8 * 128 * 2 == kv


@pytest.mark.parametrize(("kv_dtype", "each"), [("compute", 256), ("int8", 128 + 4), ("float8", 128)])
def test_bytes_of_keys_and_values_are_those_of_the_format(kv_dtype, each):
    assert planned(SMALL, "v5p:2x2x1", kv_dtype=kv_dtype).kv_bytes_a_token == 2 * 32 * 8 * each


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_a_chip_has_one_nth_of_the_keys_and_values_and_whole_parameters(ranks):
    shape = {1: "1x1x1", 2: "2x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}[ranks]
    found = planned(SMALL, f"v5p:{shape}", f"context={ranks}", context=2**14)
    assert found.kv_bytes_on_device * ranks == 131_072
    # With an int32 position for each place.
    assert found.memory["keys and values"] * ranks == 2**14 * (131_072 + 4)
    assert found.memory["parameters"] == 2 * 8_030_261_248


def test_heads_that_do_not_divide_over_tensor_are_whole_and_so_is_attention():
    split, whole = (planned(SMALL, "v5p:2x2x4", f"tensor={n},context={16 // n}", context=2**14) for n in (8, 16))
    assert split.kv_bytes_on_device == 131_072 / 8 / 2
    assert whole.kv_bytes_on_device == 131_072
    assert whole.prefill.attention_s == pytest.approx(16 * split.prefill.attention_s, rel=1e-9)
    assert not [w for w in split.warnings if "whole" in w and "heads" in w]
    assert any("8 heads of keys and values do not divide over tensor=16" in w for w in whole.warnings)


def test_parameters_divide_over_tensor_but_for_the_norms():
    norms = (2 * 32 + 1) * 4096
    found = planned(SMALL, "v5p:2x2x2", "tensor=8")
    assert found.memory["parameters"] == 2 * ((8_030_261_248 - norms) // 8 + norms)


def test_a_prompt_in_one_piece_costs_what_the_formulas_say():
    length, ranks = 2**15, 4
    read = planned(SMALL, "v5p:2x2x1", f"context={ranks}", context=length, piece=length // ranks).prefill
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert read.product_s == pytest.approx(2 * matrices * length / ranks / V5P.bf16_flops_per_s)
    pairs = length * (length + 1) / 2
    assert read.attention_s == pytest.approx(4 * 32 * 4096 * pairs / ranks / V5P.bf16_flops_per_s)
    # Three transfers of a quarter of the keys and values; one link to the neighbour.
    assert read.context_s == pytest.approx(3 * length / ranks * 131_072 / V5P.link_bytes_per_s)
    assert (read.tensor_s, read.exposed_s, read.pass_q) == (0, 0, 0)
    assert read.seconds == read.product_s + read.attention_s > read.hbm_s


def test_pieces_do_the_same_products_and_attention_as_the_whole_and_read_memory_more_often():
    whole, pieces = (planned(SMALL, "v5p:2x2x1", "tensor=4", context=2**15, piece=n).prefill for n in (2**15, 512))
    assert pieces.product_s == pytest.approx(whole.product_s)
    assert pieces.attention_s == pytest.approx(whole.attention_s)
    assert pieces.tensor_s == pytest.approx(whole.tensor_s)
    assert pieces.hbm_s > 10 * whole.hbm_s
    # 4 chips of a ring of 2 x 2: two all-reduces a layer, twice three quarters of the bytes, over both links.
    moved = 2 * 32 * 2**15 * 4096 * 2 * 2 * 3 / 4
    assert whole.tensor_s == pytest.approx(moved / (2 * V5P.link_bytes_per_s))


def test_short_pieces_go_by_pass_q_and_show_what_the_way_back_costs():
    ranks, piece = 8, 512
    found = planned(SMALL, "v5p:2x2x2", f"context={ranks}", context=2**17, piece=piece)
    # T* = n C K e / (2 H BW)
    assert found.hidden_from == pytest.approx(ranks * V5P.bf16_flops_per_s * 8 * 2 / (2 * 32 * V5P.link_bytes_per_s))
    assert found.piece == ranks * piece < found.hidden_from
    assert 0 < found.prefill.pass_q < 1
    assert found.prefill.exposed_s > 0
    longer = planned(SMALL, "v5p:2x2x2", f"context={ranks}", context=2**17, piece=2**14)
    assert longer.piece > longer.hidden_from
    assert (longer.prefill.pass_q, longer.prefill.exposed_s) == (0, 0)


def test_a_token_reads_weights_without_the_table_and_all_keys_and_values():
    found = planned(SMALL, "v5p:1x1x1", slots=4, context=2**14).decode
    weights = 2 * (8_030_261_248 - 128_256 * 4096)
    assert found.hbm_s == pytest.approx((weights + 4 * 2**14 * 131_072) / V5P.hbm_bytes_per_s)
    assert found.seconds == found.hbm_s
    assert (found.tensor_s, found.context_s) == (0, 0)


def test_a_tied_table_is_read_as_the_head():
    config = SIZES["3.2-1b"]
    found = planned(config, "v5p:1x1x1", context=1024).decode
    assert found.hbm_s == pytest.approx((2 * config.parameters() + 1024 * 2 * 16 * 8 * 64 * 2) / V5P.hbm_bytes_per_s)


@pytest.mark.parametrize(("context", "hides"), [(2**10, False), (2**17, True)])
def test_a_token_over_context_sends_queries_round_and_results_back(context, hides):
    ranks, slots = 8, 16
    machine = Gpus(dataclasses.replace(chips.H100, hbm_bytes_per_s=1e30), 8, 1)  # memory hides nothing
    found = planned(SMALL, machine, f"context={ranks}", slots=slots, context=context).decode
    rows, network = slots // ranks, chips.H100.dcn_bytes_per_s
    queries = (ranks - 1) * 32 * rows * 4096 * 2
    results = (ranks - 1) * 32 * rows * 32 * (128 + 1) * 4
    new = (ranks - 1) * 32 * rows * 2 * 8 * 128 * 2
    assert found.context_s == pytest.approx((queries + results + new) / network)
    assert (found.attention_s > queries / network) is hides
    hidden = min(queries / network, found.attention_s)
    assert found.exposed_s == pytest.approx(found.context_s - hidden)


def test_slots_beyond_the_greatest_number_do_not_fit_where_their_logits_are_most_of_them():
    config = LlamaConfig(layers=1, dim=32, ffn_dim=64, heads=4, kv_heads=4, vocabulary=2**20)
    plan = functools.partial(planned, config, "v6e:1x1", context=64)
    slots = plan().greatest_slots
    assert slots > 1
    assert plan(slots=slots).fits
    assert not plan(slots=slots + 1).fits


@pytest.mark.slow
# Logits of a slot of the second are far larger than a page.
@pytest.mark.parametrize(
    "config", [SMALL, LlamaConfig(layers=4, dim=32, ffn_dim=64, heads=4, kv_heads=4, vocabulary=2**20)]
)
@pytest.mark.parametrize("mesh", ["context=2,tensor=2", "tensor=4", "context=4"])
def test_the_greatest_context_and_slots_fit_and_more_do_not(config, mesh):
    plan = functools.partial(planned, config, "v6e:2x2", mesh, piece=2**12)
    length = 2**14
    slots = plan(context=length).greatest_slots
    assert slots > 1
    assert plan(context=length, slots=slots).fits
    assert not plan(context=length, slots=slots + 1).fits
    most = plan(context=length).greatest_context
    unit = 64 * (4 if mesh == "context=4" else 2 if "context" in mesh else 1)
    assert most % unit == 0
    assert plan(context=most).fits
    assert not plan(context=most + unit).fits


def test_what_does_not_fit_has_no_context():
    found = planned(LARGE, "v5p:2x2x4", "context=4,tensor=4")
    assert not found.fits
    assert (found.greatest_context, found.greatest_slots) == (0, 0)


def test_a_window_hides_pairs_and_leaves_memory():
    config = dataclasses.replace(SMALL, window=300)
    seen, every = (planned(c, "v5p:1x1x1", context=2000, piece=128) for c in (config, SMALL))
    pairs = sum(min(position + 1, 300) for position in range(2000))
    assert seen.prefill.attention_s == pytest.approx(4 * 32 * 4096 * pairs / V5P.bf16_flops_per_s)
    assert seen.memory == every.memory
    saved = (2000 - 300) * 131_072 / V5P.hbm_bytes_per_s
    assert every.decode.hbm_s - seen.decode.hbm_s == pytest.approx(saved)


def test_experts_are_kept_whole_and_met_by_some_tokens():
    """Mixtral 8x7B: two of eight experts a token."""
    config = LlamaConfig(
        layers=32,
        dim=4096,
        ffn_dim=14_336,
        heads=32,
        kv_heads=8,
        vocabulary=32_000,
        mlp=Experts(count=8, router=TopK(k=2)),
    )
    assert config.parameters() == 46_702_792_704
    experts = 32 * 8 * 3 * 4096 * 14_336
    rest = 46_702_792_704 - experts
    found = planned(config, "v5p:1x1x1", context=512, slots=1)
    assert found.memory["parameters"] == pytest.approx(
        2 * 46_702_792_704, abs=32 * 8 * 4
    )  # and what a router remembers
    matrices = rest - 2 * 32_000 * 4096 - 65 * 4096 + experts * 2 / 8
    assert found.prefill.product_s == pytest.approx(2 * matrices * 512 / V5P.bf16_flops_per_s)
    kv = 512 * 131_072
    read = 2 * (rest - 32_000 * 4096 + experts * 2 / 8)
    assert found.decode.hbm_s == pytest.approx((read + kv) / V5P.hbm_bytes_per_s, rel=1e-6)
    many = planned(config, "v5p:1x1x1", context=512, slots=16).decode
    read = 2 * (rest - 32_000 * 4096 + experts * (1 - 0.75**16))
    assert many.hbm_s == pytest.approx((read + 16 * kv) / V5P.hbm_bytes_per_s, rel=1e-6)


TINY = LlamaConfig(layers=4, dim=32, ffn_dim=64, heads=4, kv_heads=2, vocabulary=64)


def test_a_mixture_of_depths_is_planned_as_it_is_served():
    mixed = dataclasses.replace(TINY, depth=MixtureOfDepths(auxiliary=AuxiliaryRouter()))
    found, plain = (planned(c, "v5p:1x1x1", context=1024) for c in (mixed, TINY))
    assert any("count as layers that take all" in w for w in found.warnings)
    assert found.kv_bytes_a_token == plain.kv_bytes_a_token
    assert found.prefill.attention_s == plain.prefill.attention_s
    assert found.prefill.product_s > plain.prefill.product_s  # its routers
    assert planned(mixed, "v5p:2x1x1", "context=2").kv_bytes_a_token == found.kv_bytes_a_token


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(TINY, depth=MixtureOfDepths()),
        dataclasses.replace(TINY, mlp=Experts(count=4, router=ExpertChoice(), execution="batched")),
    ],
    ids=["depths", "experts"],
)
def test_what_needs_later_tokens_is_refused(config):
    with pytest.raises(UserError, match="without an auxiliary router"):
        planned(config, "v5p:1x1x1", context=64)


# The hardware of section 4 of arXiv 2411.01783: 96 GB of HBM2e, 500 W.
PAPER = dataclasses.replace(chips.H100, hbm_bytes_per_s=2.4e12, bf16_flops_per_s=800e12)


def test_the_paper_says_from_where_pass_kv_hides_and_how_much_work_a_million_tokens_are():
    # Section 3: N = 4, C = 800e12, BW = 50e9 give T* = 4000.
    assert planned(LARGE, Gpus(PAPER, 4, 8), "context=4,tensor=8").hidden_from == pytest.approx(4000)
    # Appendix A: 8.1e17 for the matrices and 4.13e18 for attention.
    length = 1_000_000
    found = planned(LARGE, Gpus(PAPER, 16, 8), "context=16,tensor=8", context=length, piece=length // 16).prefill
    peak = 128 * 800e12
    assert found.product_s * peak == pytest.approx(8.1e17, rel=0.02)
    assert found.attention_s * peak == pytest.approx(4.13e18, rel=0.01)
    assert found.exposed_s == 0
    # 77 s at 502 TFLOP/s a GPU; sums over the links within hosts come on top.
    assert (found.product_s + found.attention_s) * 800 / 502 == pytest.approx(77, rel=0.01)


def test_gpus_of_a_host_are_joined_by_nvlink_and_hosts_by_the_network():
    inside, across = (planned(SMALL, f"h100:{n}", "context=8", context=2**15).prefill for n in ("1x8", "8x1"))
    # Another choice between pass-KV and pass-Q for each, so by what a token sends.
    assert inside.context_s < across.context_s
    reading = functools.partial(planned, SMALL, context=2**15, piece=2**12)
    inside, across = (reading(f"h100:{n}", "context=8").prefill for n in ("1x8", "8x1"))
    assert across.context_s / inside.context_s == pytest.approx(450 / 50)
    assert planned(SMALL, "h100:2x8").mesh == {"context": 2, "tensor": 8}


@pytest.mark.parametrize(
    ("machine", "mesh", "message"),
    [
        ("v5p:2x2x1", "fsdp=4", "--mesh fsdp=4: --serve plans one copy of a model over context and tensor; got fsdp=4"),
        ("v5p:2x2x1", "context=3", "the sizes must multiply to the 4 devices of v5p:2x2x1. Try context=-1,tensor=4"),
        ("v5p:2x2x1,slices=2", None, "a served model lies on one slice"),
        ("h100:0x8", None, "hosts and GPUs of a host must be at least 1"),
        ("h300:1x8", None, "GPUs: a100-40gb:2x8"),
    ],
)
def test_mistakes_are_named(machine, mesh, message):
    with pytest.raises(UserError) as caught:
        planned(SMALL, machine, mesh)
    assert message in str(caught.value)


def test_devices_of_a_chip_share_its_memory_and_rates():
    found = planned(SMALL, "tpu7x:2x2x1", "tensor=8", context=4096)
    assert found.usable_bytes == chips.TPU7X.usable_hbm_bytes // 2
    weights = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096) / 8 + 2 * 65 * 4096
    assert found.decode.hbm_s == pytest.approx((weights + 4096 * 131_072 / 8) / (chips.TPU7X.hbm_bytes_per_s / 2))


def test_heads_that_are_narrower_than_the_matrix_unit_leave_part_of_it_idle():
    found = planned(SMALL, "v6e:1x1", context=1024).prefill
    assert found.attention_s == pytest.approx(4 * 32 * 4096 * 1024 * 1025 / 2 / (chips.V6E.bf16_flops_per_s / 2))


def test_a_plan_is_plain_values():
    found = planned(SMALL, "v5p:2x2x1", context=2**18)
    assert any("131,072 positions" in w for w in found.warnings)
    read = json.loads(json.dumps(found.to_json()))
    assert read["fits"] is True
    assert read["prefill"]["seconds"] == found.prefill.seconds
    assert math.isclose(read["tokens_per_s"], 1 / found.decode.seconds)
