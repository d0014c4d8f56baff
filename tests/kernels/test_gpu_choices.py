"""What None takes on a GPU, against the times of benchmarks/results/gpu_kernels.md and in programs for one."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from scalejax.kernels import block_quant, embedding_bag, gpu_choices, group_quantize, mx
from scalejax.kernels.group_quantize import IntGroups
from scalejax.numerics.formats import FORMATS

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_kernels.md"

HOPPER = jax.sharding.AbstractMesh(
    (),
    (),
    abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda"),
)

GROUPS = {
    "transform and quantize": "quantize",
    "sum and transform": "dequantize_sum",
    "sum and quantize": "requantize",
    "add": "dequantize_add",
}


def tables(text):
    """(heading of the section, cells of the head, rows of cells) of every table of a document."""
    heading, rows = "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if rows:
            yield heading, rows[0], rows[2:]
            rows = []
        if line.startswith("## "):
            heading = line.removeprefix("## ")


def number(cell):
    return float(re.sub(r"[,ms ]", "", cell))


def timed(text):
    """{(kernel, operation, format): [(time of the kernel, of XLA or a library)]}."""
    found = {}

    def add(line, ours, theirs):
        found.setdefault(line, []).append((number(ours), number(theirs)))

    for heading, head, rows in tables(text):
        for label, *cells in rows:
            columns = dict(zip(head[1:], cells, strict=True))
            if heading.startswith("Integer groups"):
                add(("group_quantize", GROUPS[label.rpartition(", ")[0]]), columns["now"], columns["XLA"])
            elif heading.startswith("Packed blocks") and head[1] == "axis 1":
                verb, format = label.split()
                for at in (1, 4):  # blocks along either axis: time, share of a copy, time of XLA
                    add(("mx", f"{verb}_blocks", format), cells[at - 1], cells[at + 1])
            elif heading.startswith("Attention"):
                add(("flash_attention", "flash_attention"), columns["our Triton kernels"], columns["cuDNN"])
            elif heading.startswith("Lookups"):
                add(("embedding_bag", "embedding_bag"), columns["our Triton kernel"], columns["XLA"])
    return found


def contradictions(text):
    """Lines of the choices, or of the times, that are not what the other says."""
    wrong = {
        line
        for line, times in timed(text).items()
        if (gpu_choices.TIMED.get(line, ("nothing",))[0] == "pallas_gpu") != all(ours <= it for ours, it in times)
    }
    return wrong | (timed(text).keys() ^ gpu_choices.TIMED.keys())


@pytest.mark.skipif(not RESULTS.exists(), reason="runs in a checkout")
def test_choices_are_those_of_the_measurements():
    text = RESULTS.read_text()
    assert len(timed(text)) == 18
    assert contradictions(text) == set()


@pytest.mark.skipif(not RESULTS.exists(), reason="runs in a checkout")
@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("| quantize nvfp4 | 1,268 | .23 | 1,173 | 1,071 |", "| quantize nvfp4 | 1,168 | .23 | 1,173 | 971 |", "nvfp4"),
        ("| zipf ids, 8 a bag | 197 |", "| zipf ids, 8 a bag | 10,197 |", "embedding_bag"),
        ("| quantize bdr_mx6 |", "| quantize bdr_mx5 |", "bdr_mx5"),
    ],
)
def test_a_measurement_that_contradicts_a_choice_is_seen(before, after, line):
    text = RESULTS.read_text()
    assert before in text
    assert any(line in name for name in contradictions(text.replace(before, after)))


def kernels(function, *args):
    """Names of the Pallas kernels of a program for a GPU, which is only traced."""
    with jax.sharding.use_abstract_mesh(HOPPER):
        return set(re.findall(r"name=((?:embedding|mx|group|quantized)_\w+)", str(jax.make_jaxpr(function)(*args))))


def like(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


TABLE, IDS, BAGS = like((1000, 64)), like((128,), jnp.int32), like((16,), jnp.int32)
PLAN = embedding_bag.RowPlan(IDS, IDS, IDS)


def updated(table, plan, sums):
    return embedding_bag.update_rows((table,), plan, sums, lambda arrays, grads: (arrays[0] - grads,))


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (embedding_bag.embedding_bag, (TABLE, IDS, BAGS), {"embedding_bag"}),
        (embedding_bag.gather_rows, (TABLE, IDS), {"embedding_gather_rows"}),
        (embedding_bag.gather_rows, (like((1000, 32), jnp.uint32), IDS), set()),
        (embedding_bag.sum_by_row, (like((128, 64)), PLAN), set()),
        (updated, (TABLE, PLAN, like((128, 64))), set()),
    ],
    ids=["bag", "rows", "packed rows", "sums of gradients", "updates"],
)
def test_lookups_take_the_kernel_and_updates_do_not(function, args, expected):
    assert kernels(function, *args) == expected


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1", "nvfp4", "int8:128"])
def test_blocks_take_what_is_faster(name):
    made = kernels(lambda x: mx.quantize_blocks(x, name, axis=-1), like((8, 2048)))
    assert made == (set() if name in ("nvfp4", "int8:128") else {"mx_quantize"})
    packed = jax.eval_shape(lambda x: mx.quantize_blocks(x, name, axis=-1), like((8, 2048)))
    assert kernels(mx.dequantize_blocks, packed) == (set() if name == "int8:128" else {"mx_dequantize"})


def test_integer_groups_take_what_is_faster():
    format, x = IntGroups(bits=4, size=128), like((2, 1024))
    groups = jax.eval_shape(lambda x: group_quantize.quantize(x, format), x)
    assert kernels(lambda x: group_quantize.quantize(x, format), x)
    assert kernels(lambda g: group_quantize.dequantize_sum(g, format), groups)
    assert kernels(lambda g: group_quantize.requantize(g, format, format), groups)
    assert not kernels(lambda g: group_quantize.dequantize(g, format), groups)
    assert not kernels(lambda x, g: group_quantize.dequantize_add(x, g, format), x, groups)


def test_packed_rows_take_xla():
    rows = jax.eval_shape(lambda t: block_quant.quantize_rows(t, "int8"), TABLE)
    assert kernels(block_quant.quantized_bag, rows, IDS, BAGS) == set()


def test_every_line_ends_with_what_has_every_case():
    choices = gpu_choices.TIMED | gpu_choices.NOT_TIMED
    assert {names[-1] for line, names in choices.items() if line[0] != "grouped_matmul"} == {"xla"}
    assert {line[2] for line in choices if len(line) == 3} <= set(FORMATS)
