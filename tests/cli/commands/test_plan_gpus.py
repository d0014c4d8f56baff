"""`scalejax plan` of click models on hosts of GPUs: what it prints and writes, and mistakes."""

import json

import pytest


def test_a_model_over_towers_is_planned_by_strategy_and_by_route(invoke, tmp_path):
    out = tmp_path / "plan.json"
    asked = ("--topology", "a100-80gb:2x8", "--set", "data.batch_size=65536", "--json", str(out))
    done = invoke("plan", "dlrm-flights_towers", *asked)
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["machine"], found["examples"]) == ("a100-80gb:2x8", 4096)
    assert set(found["dense"]) == {"NO_SHARD", "FULL_SHARD", "HYBRID_SHARD"}
    assert set(found["step_s"]) == {"flat", "two_level", "towers"}
    # Four equal towers of 4 features with vectors of 32: 32 wide enter, and leave as the recipe's modules make them.
    assert found["work"]["width"] == 16 * 32
    assert found["work"]["towers"]["count"] == 4
    text = " ".join(done.stdout.split())
    for words in ("a100-80gb:2x8: 4,096 examples a GPU", "over 4 towers", "HYBRID_SHARD", "two_level", "by arithmetic"):
        assert words in text


def test_a_flat_model_has_no_towers_and_a_stack_its_layers(invoke, tmp_path):
    out = tmp_path / "plan.json"
    changes = ("--set", "data.batch_size=8192", "--set", "model.repeats=4")
    done = invoke("plan", "dhen", "--topology", "a100-40gb:32x8", *changes, "--json", str(out))
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["step_s"]) == {"flat", "two_level"}
    assert (found["work"]["layers"], found["work"]["towers"]) == (4, None)


@pytest.mark.parametrize(("hosts", "batch", "words"), [(64, 1024, True), (2, 2**20, False)])
def test_steps_that_are_mostly_latency_are_said_to_be(invoke, hosts, batch, words):
    """2 examples a GPU and 65,536: what a launch or a collective takes at least is not in the arithmetic."""
    asked = ("--topology", f"h100:{hosts}x8", "--set", f"data.batch_size={batch}")
    done = invoke("plan", "dlrm-flights_towers", *asked)
    assert done.exit_code == 0, done.stderr
    assert ("Warning: steps under 1 ms are longer than this" in " ".join(done.stdout.split())) == words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("llama", "--topology", "h100:2x8"), "planned for click models, and llama has LlamaConfig"),
        (("dhen", "--topology", "h100:2x8", "--mesh", "fsdp=16"), "--mesh goes with TPUs; a step on h100:2x8"),
        (("dhen", "--topology", "h100:2x8", "--search"), "--search goes with TPUs"),
        (("dhen", "--topology", "h100:2x8", "--set", "placement.mesh.fsdp=2"), "--set placement.mesh goes with TPUs"),
    ],
)
def test_mistakes_are_one_message(invoke, command, words):
    done = invoke("plan", *command)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
