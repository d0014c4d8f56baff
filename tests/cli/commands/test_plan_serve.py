"""`scalejax plan --serve`: its tables, its file, folders, and mistakes."""

import json

import pytest
from llama_cases import GQA, MISTRAL, write_checkpoint

TOPOLOGY = ("--topology", "v5p:4x4x4")


def test_a_recipe_is_planned_as_it_would_be_served(invoke, tmp_path):
    out = tmp_path / "plan.json"
    asked = ("--mesh", "context=8,tensor=8", "--slots", "4", "--context-length", "65536", "--kv-dtype", "int8")
    done = invoke("plan", "llama-pretrain-405b", "--serve", *TOPOLOGY, *asked, "--json", str(out))
    assert done.exit_code == 0, done.stderr
    found = json.loads(out.read_text())
    # In bfloat16, and of int8 a byte a number with a float32 a token and head.
    assert found["parameters"] == 405_853_388_800
    assert found["kv_bytes_a_token"] == 2 * 126 * 8 * (128 + 4)
    assert (found["mesh"], found["slots"], found["context"]) == ({"context": 8, "tensor": 8}, 4, 65_536)
    assert found["piece"] == 8 * 512
    for words in (
        "v5p:4x4x4: mesh context=8, tensor=8; 405,853,388,800 parameters",
        "keys and values of a token: 266,112 bytes, of which a device has 4,158",
        f"at most {found['greatest_context']:,} tokens in one sequence alone",
        "a prompt of 65,536 tokens: at least",
        "a token of each of 4 of 65,536 tokens: at least",
        "pass-KV hides its transfers from 2,295 new tokens on",
    ):
        assert words in " ".join(done.stdout.split())


def test_without_more_it_is_eight_slots_of_what_the_model_is_meant_for(invoke, tmp_path):
    out = tmp_path / "plan.json"
    invoke("plan", "llama-pretrain-8b", "--serve", "--topology", "h100:2x8", "--json", str(out))
    found = json.loads(out.read_text())
    assert (found["slots"], found["context"]) == (8, 131_072)
    assert found["mesh"] == {"context": 2, "tensor": 8}


@pytest.mark.parametrize(("config", "dtype", "size"), [(GQA, "bfloat16", 2), (MISTRAL, "float32", 4)])
def test_a_folder_is_planned_in_its_own_dtype(invoke, tmp_path, config, dtype, size):
    folder, out = tmp_path / "model", tmp_path / "plan.json"
    write_checkpoint(folder, config, dtype=dtype)
    command = ("plan", str(folder), "--serve", "--topology", "v5p:1x1x1", "--page", "16", "--json", str(out))
    assert invoke(*command).exit_code == 0
    assert json.loads(out.read_text())["memory"]["parameters"] == size * config.parameters()
    assert invoke(*command, "--dtype", "float16").exit_code == 0
    assert json.loads(out.read_text())["memory"]["parameters"] == 2 * config.parameters()
    refused = invoke(*command, "--set", "model.layers=1")
    assert refused.exit_code == 2
    assert "is a folder, whose model is what it is" in refused.stderr


def test_a_model_is_planned_as_its_last_phase_leaves_it(invoke):
    done = invoke("plan", "moma-mod-smoke", "--serve", "--topology", "v5p:1x1x1")
    assert done.exit_code == 0, done.stderr  # it has auxiliary routers by then
    assert "layers that take some tokens count as layers that take all" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama", "--serve", *TOPOLOGY, "--search"), "--serve plans a model that is served, --search one that is"),
        (("llama", "--serve", *TOPOLOGY, "--phase", "x"), "--serve plans a model that is served, --phase one that is"),
        (
            ("llama", *TOPOLOGY, "--slots", "3"),
            "--slots is of a model that is served. Add --serve, or leave --slots out",
        ),
        (("llama", *TOPOLOGY, "--search", "--dtype", "float32"), "--dtype is of a model that is served. Add --serve"),
        (("wukong", "--serve", *TOPOLOGY), "--serve plans language models, and wukong has WukongConfig"),
        (("llama", "--serve", *TOPOLOGY, "--page", "0"), "--page must be one of 16, 32, 64, 128; got 0"),
        (("llama", "--serve", *TOPOLOGY, "--set", "placement.mesh.tensor=2"), "--serve takes the mesh by --mesh; got"),
        (("llama", "--serve", *TOPOLOGY, "--kv-dtype", "int4"), "--kv-dtype must be one of none, int8, float8; got"),
        (("llama", "--serve", *TOPOLOGY, "--dtype", "int8"), "--dtype"),
        (("llama", "--serve", *TOPOLOGY, "--mesh", "fsdp=64"), "--serve plans one copy of a model over context and"),
        (("llama", "--serve", *TOPOLOGY, "--mesh", "tensor=8"), "must multiply to the 64 devices of v5p:4x4x4"),
        (("llama", "--serve", "--topology", "v9:4x4"), "chip must be one of"),
    ],
)
def test_mistakes_are_one_message(invoke, arguments, message):
    refused = invoke("plan", *arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert refused.stdout == ""
