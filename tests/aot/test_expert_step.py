"""A step with experts on eight chips, fsdp 2 x expert 4: kernels are in it, and its exchange has the stated bytes."""

import functools
import importlib.util
import pathlib

import pytest

from scalejax.plan.compiled import hlo

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "expert_exchange.py"

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout; here are no benchmarks"),
]

ATTENTION = {"flash_attention_forward", "flash_attention_query_gradient", "flash_attention_key_gradients"}
GROUPED = {"", "_gated", "_gate_gradients", "_transposed", "_weight_gradients"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("expert_exchange", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.compiled = functools.cache(module.compiled)
    return module


def kernels(text):
    """Names of the kernels of Pallas in a compiled program."""
    calls = (i for c in hlo.parse(text).computations.values() for i in c.instructions if i.opcode == "custom-call")
    return {i.name.partition(".")[0] for i in calls if '"tpu_custom_call"' in i.attributes}


CASES = [("v5e", "Mixtral"), ("v5p", "MoMa"), ("v6e", "Mixtral, ragged")]
"""One a chip: a step compiles for half a minute."""


@pytest.mark.parametrize(("chip", "model"), CASES)
def test_a_step_has_its_kernels_and_the_bytes_of_the_formula(script, chip, model):
    """Experts of MoMa have equally many places: their products are XLA's."""
    text, found = script.compiled(chip, model)
    assert kernels(text) == ATTENTION | ({f"grouped_matmul{name}" for name in GROUPED} if model != "MoMa" else set())
    travels = [c for c in found if c.kind.endswith("all-to-all")]
    assert {c.axis for c in travels} == {"expert"}
    assert sum(c.bytes for c in travels) == script.sent(model)
    assert {c.kind for c in travels} == {"ragged-all-to-all" if "ragged" in model else "all-to-all"}


def test_the_option_parts_every_exchange_in_two(script):
    waiting, apart = (script.schedule(script.compiled("v5p", "MoMa", *flags)[0]) for flags in ((), (script.ASYNC,)))
    assert len(waiting) == len(apart) == 8
    assert all(one.beside is None for one in waiting)
    assert all(one.beside is not None for one in apart)
