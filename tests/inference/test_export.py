"""Folders of language models that jax and numpy alone can score with: equal logits, any number of texts, refusals."""

import dataclasses
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import GQA, MIXTRAL, model, tokens, write_checkpoint

from scalejax import compat
from scalejax.cli.commands import export as command
from scalejax.errors import UserError
from scalejax.inference import export, generate, program_folder, reload
from scalejax.models.llm import families, model_folder
from scalejax.models.llm.experts import AuxiliaryRouter, ExpertChoice
from scalejax.models.llm.moma import ModalityExperts
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape

CONFIGS = {"llama": GQA, "mixtral": MIXTRAL}
LENGTH = 24
BARE = """
import sys
for name in ("scalejax", "flax", "optax", "orbax", "safetensors", "flatbuffers", "typer"):
    sys.modules[name] = None  # importing any of these fails now
sys.path.insert(0, sys.argv[1])
import numpy as np
import reload
np.save(sys.argv[3], reload.load(sys.argv[1])(np.load(sys.argv[2]))["logits"])
"""


def engine(tmp_path, config, devices=1, **more):
    write_checkpoint(tmp_path / "theirs", config)
    mesh = make_mesh(MeshShape(fsdp=devices), jax.devices()[:devices])
    return generate.load(model_folder.open_folder(tmp_path / "theirs"), mesh, **more)


def wanted(config, ids):
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return np.asarray(jax.jit(lambda m, *inputs: m(*inputs))(model(config), ids, positions, np.ones_like(ids)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "logits"), [*zip(CONFIGS, itertools.cycle(["last", "all"]), strict=False)])
def test_logits_are_those_of_the_model(tmp_path, name, logits):
    config = CONFIGS[name]
    made = engine(tmp_path, config)
    signature = export.write(made, tmp_path / "out", rows=2, length=LENGTH, logits=logits)
    assert signature["calling"]["platforms"] == ["cpu", "cuda", "tpu"]
    loaded = reload.load(tmp_path / "out")
    texts = tokens(config, 3, LENGTH)
    lengths = (24, 7, 1)
    found = loaded([text[:length] for text, length in zip(texts, lengths, strict=True)])["logits"]
    expected = wanted(config, texts)
    for row, length in enumerate(lengths):
        if logits == "all":
            np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-5, rtol=0)
        else:
            np.testing.assert_allclose(found[row], expected[row, length - 1], atol=1e-5, rtol=0)
    assert export.difference(loaded, made) < 1e-6


@pytest.mark.slow
def test_it_runs_where_neither_scalejax_nor_flax_can_be_imported(tmp_path):
    export.write(engine(tmp_path, MIXTRAL), tmp_path / "out", rows=2, length=LENGTH)
    np.save(tmp_path / "tokens.npy", tokens(MIXTRAL, 2, LENGTH))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    files = [str(tmp_path / name) for name in ("out", "tokens.npy", "logits.npy")]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = wanted(MIXTRAL, tokens(MIXTRAL, 2, LENGTH))[:, -1]
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_narrow_weights_stay_narrow(tmp_path):
    made = engine(tmp_path, GQA, dtype="bfloat16")
    signature = export.write(made, tmp_path / "out", length=LENGTH)
    assert {entry["dtype"] for entry in signature["weights"].values()} == {"bfloat16"}
    loaded = reload.load(tmp_path / "out")
    found = loaded(tokens(GQA, 1, LENGTH))["logits"]
    np.testing.assert_allclose(found, wanted(GQA, tokens(GQA, 1, LENGTH))[:, -1], atol=0.3)
    assert export.difference(loaded, made) < export.LARGEST_DIFFERENCE_IN_16_BITS / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "differs", "limit"), [("float32", 2e-5, "1e-05"), ("bfloat16", 0.03, "0.02"), ("float16", 0.03, "0.02")]
)
def test_what_is_read_back_wrong_is_refused_in_any_dtype(tmp_path, monkeypatch, dtype, differs, limit):
    write_checkpoint(tmp_path / "theirs", GQA)
    monkeypatch.setattr(export, "difference", lambda *_: differs)
    monkeypatch.setattr(reload, "load", lambda _: None)
    monkeypatch.setattr(export, "write", lambda *_, **__: {})
    with pytest.raises(UserError, match=rf"differ from the model's by {differs:.1e}, more than {limit}\. Do not"):
        command._export_language(
            model_folder.open_folder(tmp_path / "theirs"),
            tmp_path / "out",
            rows=1,
            length=LENGTH,
            logits="last",
            dtype=dtype,
            json=None,
        )


MOMA = dataclasses.replace(
    GQA,
    mlp=ModalityExperts(groups=(("text", 2), ("image", 2)), capacities=(24, 24), ranges=(("image", 64, 96),)),
)


def moma(auxiliary):
    """A model of random weights."""
    router = ExpertChoice(auxiliary=AuxiliaryRouter() if auxiliary else None)
    config = dataclasses.replace(MOMA, mlp=dataclasses.replace(MOMA.mlp, router=router))
    shape = ModelShape.of(nnx.eval_shape(lambda: families.of(config).build(config, nnx.Rngs(0), Dtypes())))
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(0, 0.2, p.shape), p.dtype) for name, p in shape.params.items()}
    return generate.Engine(config, shape, params, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["last", "all"])
def test_experts_that_choose_need_auxiliary_routers(tmp_path, logits):
    with pytest.raises(UserError, match="Train auxiliary routers"):
        export.write(moma(auxiliary=False), tmp_path / "out", length=8, logits=logits)
    assert not (tmp_path / "out").exists()
    made = moma(auxiliary=True)
    export.write(made, tmp_path / "out", length=8, logits=logits)
    assert export.difference(reload.load(tmp_path / "out"), made) < 1e-6


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tmp_path):
    made = engine(tmp_path, GQA)
    for more, words in (
        ({"rows": 0}, "--rows must be at least 1; got 0"),
        ({"length": 0}, "--length must be from 1 to 16,384"),
        ({"length": 20_000}, "--length must be from 1 to 16,384, the model's positions; got 20,000"),
    ):
        with pytest.raises(UserError, match=words):
            export.write(made, tmp_path / "out", **more)
    with pytest.raises(UserError, match="on 2 devices"):
        export.write(engine(tmp_path, GQA, devices=2), tmp_path / "out")


def test_what_a_loaded_model_refuses(tmp_path):
    export.write(engine(tmp_path, GQA), tmp_path / "out", length=LENGTH)
    loaded = reload.load(tmp_path / "out")
    for given, words in (
        ([], "lists of 1 to 24 ids"),
        ([[]], "lists of 1 to 24 ids"),
        ([[1], list(range(25))], r"lists of 1 to 24 ids, a list for each text; got \[ 1 25\] ids"),
        ([[1, 96]], r"text 0 must have ids in \[0, 96\); got 1 to 96"),
        ([[1], [-1]], r"text 1 must have ids in \[0, 96\)"),
        ([[1.5]], "text 0 must have ids that are integers; got float64"),
    ):
        with pytest.raises(ValueError, match=words):
            loaded(given)


def test_a_program_has_no_kernels_of_the_chip_that_it_is_written_on(tmp_path):
    hopper = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    platforms = []

    def function(weights, inputs):
        platforms.append(compat.platform())
        return (weights["w"] * inputs["x"],)

    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    described = {"format": "of a test", "model": "none"}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=hopper)):
        assert compat.platform() == "gpu"
        program_folder.write(tmp_path / "out", function, {"w": jnp.ones(2)}, {"x": x}, ("y",), described=described)
    assert set(platforms) == {"cpu"}
