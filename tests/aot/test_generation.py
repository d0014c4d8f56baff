"""The two programs of generation, compiled for four TPU chips: layers as wide as those of 8B."""

import collections
import dataclasses

import pytest

from scalejax.inference import sampling
from scalejax.inference.ahead_of_time import AbstractEngine
from scalejax.models.llm import llama3
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import run, topology
from scalejax.plan.compiled import collectives, hlo

pytestmark = pytest.mark.aot

POSITIONS = 65_536
LAYERS = 2


def on_four_chips(chip="v6e:2x2", **axes):
    machine = topology.parse(chip)
    mesh, _ = topology.make_mesh(machine, MeshShape(fsdp=1, **axes))
    config = dataclasses.replace(llama3.SIZES["3.1-8b"], layers=LAYERS)
    return AbstractEngine.of(config, mesh, kv_tokens=POSITIONS)


def compile_all(lowered):
    with run.no_compile_cache():
        return {name: program().compile() for name, program in lowered.items()}


@pytest.fixture(scope="module", autouse=True)
def without_nucleus():
    # The sort of a vocabulary for top_p and top_k compiles for minutes.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sampling, "nucleus", lambda logits, top_p, top_k: logits)
    yield
    monkeypatch.undo()


@pytest.fixture(scope="module")
def compiled():
    """{program: compiled} over `tensor`, and the bytes of the cache on a chip."""
    engine = on_four_chips(tensor=4)
    return compile_all({"read": lambda: engine.read(1, 512), "decode": lambda: engine.decode(1)}), engine.kv_bytes


@pytest.mark.parametrize("program", ["read", "decode"])
def test_the_tpu_compiler_takes_it_and_keeps_one_cache(compiled, program):
    programs, cache_bytes = compiled
    found = programs[program].memory_analysis()
    assert found.alias_size_in_bytes >= cache_bytes
    text = programs[program].as_text()
    assert ("%ragged_paged_attention" in text) == (program == "read")
    assert ("%paged_attention" in text) == (program == "decode")
    # Pages are not gathered: keys and values of one layer alone are half of the cache, 64 MiB.
    assert found.temp_size_in_bytes < (cache_bytes / 2 if program == "decode" else 2.1 * 2**20)


def test_a_decoding_step_moves_activations_and_no_weights(compiled):
    text = compiled[0]["decode"].as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    for line in gathered:
        assert "bf16[4096,14336]" not in line
        assert f"{POSITIONS}" not in line.split("all-gather(")[0]


def test_no_weights_of_all_layers_are_turned_around(compiled):
    """They lie in the order in which they are multiplied, see `Programs.format`; with one slot any order would do."""
    several = compile_all({"decode": lambda: on_four_chips(tensor=4).decode(8)})
    for program in (compiled[0]["read"], several["decode"]):
        module = hlo.parse(program.as_text())
        copies = [i for c in module.computations.values() for i in c.instructions if i.opcode == "copy"]
        assert [i.name for i in copies if i.arrays[0].dims[:2] == (LAYERS, 4096)] == []


@pytest.fixture(scope="module")
def along_context():
    """{program: compiled} over `context`, and an engine. A kernel goes round on v6e, transfers of XLA on v5p."""
    engine, other = on_four_chips(context=4), on_four_chips("v5p:2x2x1", context=4)
    programs = {
        "pass_kv": lambda: engine.read(1, TOKENS, "pass_kv"),
        "pass_kv, transfers": lambda: other.read(1, TOKENS, "pass_kv"),
        "pass_q": lambda: engine.read(1, TOKENS, "pass_q"),
        "decode": lambda: engine.decode(SLOTS),
    }
    return compile_all(programs), engine


RANKS, TOKENS, SLOTS = 4, 2048, 8
KEYS = POSITIONS // RANKS * 8 * 128 * 2
"""Bytes of all keys of a chip in a layer."""


@pytest.mark.parametrize(
    ("program", "travelling"),
    [
        ("pass_kv", {}),  # a kernel sends keys and values
        ("pass_kv, transfers", {KEYS: 2, POSITIONS // RANKS * 4: 1}),
        ("pass_q", {TOKENS // RANKS * 32 * 128 * 2: 1, TOKENS // RANKS * 4: 1}),
        ("decode", {SLOTS // RANKS * 32 * 128 * 2: 1, SLOTS // RANKS * 4: 1}),
    ],
)
def test_along_context_transfers_are_those_of_the_method_and_keys_stay(along_context, program, travelling):
    """A layer sends each travelling array one time less than there are chips, beside what is computed; results of
    queries come back at once. Their positions, which are those of all layers, leave the loop over layers."""
    programs, engine = along_context
    module = hlo.parse(programs[program].as_text())
    found = collectives.of_module(module, engine.engine.mesh)
    sent = collections.Counter()
    for c in found:
        if c.kind == "collective-permute":
            sent[c.bytes // c.count] += 1
        elif c.kind == "all-to-all":
            assert not program.startswith("pass_kv")
            assert c.count == LAYERS
        elif program == "pass_kv" and c.bytes // c.count == POSITIONS * 4:
            assert c.kind == "all-gather"
        else:  # logits, ids, and new keys and values of a block
            assert c.bytes // c.count <= SLOTS * 8 * 128 * 2
    assert sent == {size: count * (RANKS - 1) for size, count in travelling.items()}
    assert [c.kind for c in found].count("all-to-all") == (not program.startswith("pass_kv"))
    dones = [
        (computation, i)
        for computation in module.computations.values()
        for i in computation.instructions
        if i.opcode == "collective-permute-done" and i.arrays[0].dtype == "bf16"
    ]
    assert len(dones) == (RANKS - 1) * {"pass_kv": 0, "pass_kv, transfers": 2}.get(program, 1)
    assert ("%ring_attention" in programs[program].as_text()) == (program == "pass_kv")
    for computation, done in dones:
        order = [i.name for i in computation.instructions]
        between = computation.instructions[order.index(done.operands[0]) + 1 : order.index(done.name)]
        assert any(i.opcode in ("custom-call", "fusion") for i in between), done.name


def test_along_context_a_chip_has_a_share_of_the_cache(along_context):
    programs, engine = along_context
    whole = 2 * 8 * 128 * 2 * LAYERS * POSITIONS
    positions = 4 * POSITIONS
    assert engine.kv_bytes == (whole + positions) // 4
    for program in programs.values():
        assert program.memory_analysis().alias_size_in_bytes >= engine.kv_bytes
