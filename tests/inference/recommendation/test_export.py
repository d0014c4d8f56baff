"""Folders that jax and numpy alone can score with: equal scores, other batch sizes, refusals."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import click_cases
import jax
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.inference import reload
from scalejax.inference.recommendation import calibration, click_model, export, lowering, precision
from scalejax.models.llm import safetensors

BARE = """
import sys
for name in ("scalejax", "flax", "optax", "orbax", "grain", "safetensors", "flatbuffers", "pydantic", "typer"):
    sys.modules[name] = None  # importing any of these fails now
sys.path.insert(0, sys.argv[1])
import json
import numpy as np
import reload
inputs = json.load(open(sys.argv[2]))
model = reload.load(sys.argv[1])
found = model(inputs["ids"], inputs["dense"])
np.save(sys.argv[3], found["probabilities"])
print(sorted(name for name in sys.modules if name.split(".")[0] in ("scalejax", "flax") and sys.modules[name]))
"""


def lowered(name="dlrm", tables="float32", dense="float32"):
    model = click_cases.model(name)
    some = [click_model.inputs_of(click_cases.batch(64, seed=9), click_cases.SCHEMA)]
    return lowering.lower(
        model,
        precision.uniform(model, tables=tables, dense=dense),
        calibration.limits(model, some) if dense == "int8" else None,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model in float32 and its folder."""
    folder = tmp_path_factory.mktemp("export") / "out"
    made = lowered()
    return made, folder, export.write(made, folder)


def wanted(made, one):
    scores = made.score(made.arrays, click_model.inputs_of(one, click_cases.SCHEMA))
    return np.asarray(jax.nn.sigmoid(scores))


def given(one):
    lists = one.features.to_lists()
    return {n: ids if n == "pages" else np.asarray(ids) for n, ids in lists.items()}


@pytest.mark.slow
def test_scores_of_any_batch_size_are_those_of_the_model(written):
    made, folder, _ = written
    model = reload.load(folder)
    for examples in (1, 64, 200):
        one = click_cases.batch(examples, seed=examples)
        found = model(given(one), one.dense)
        assert found["probabilities"].shape == (examples, 1)
        assert np.abs(found["probabilities"] - wanted(made, one)).max() < 1e-6
        by_hand = click_cases.by_hand(made.model, one)
        assert np.abs(found["logits"] - by_hand).max() < 1e-5
    lengths = {"pages": one.features["pages"].lengths[0]}
    flat = given(one) | {"pages": one.features["pages"].values}
    assert np.array_equal(model(flat, one.dense, lengths)["logits"], found["logits"])


@pytest.mark.slow
def test_it_loads_where_neither_scalejax_nor_flax_can_be_imported(written, tmp_path):
    made, folder, _ = written
    one = click_cases.batch(32)
    inputs = {"ids": {n: np.asarray(v).tolist() if n != "pages" else v for n, v in given(one).items()}}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs | {"dense": one.dense.tolist()}))
    elsewhere = tmp_path / "copied"
    shutil.copytree(folder, elsewhere)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(elsewhere), str(tmp_path / "inputs.json"), str(tmp_path / "scores.npy")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert np.abs(np.load(tmp_path / "scores.npy") - wanted(made, one)).max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tables", "dense"),
    [
        ("dlrm", "int8", "int8"),
        ("wukong", "int4", "float16"),
        ("dlrm", "kmeans4_shared", "float32"),
        ("dcnv2", "float16", "float32"),
        ("logistic", "int2", "float16"),
    ],
)
def test_other_models_and_precisions(name, tables, dense, tmp_path):
    made = lowered(name, tables, dense)
    signature = export.write(made, tmp_path / "out")
    assert set(signature["precisions"]["tables"].values()) == {tables}
    one = click_cases.batch(48)
    found = reload.load(tmp_path / "out")(given(one), one.dense)["probabilities"]
    # A float32 sum that is rounded otherwise may move an activation to the next code.
    assert np.abs(found - wanted(made, one)).max() < (2e-3 if dense == "int8" else 1e-6)


def test_files_hold_what_the_signature_says(written):
    made, folder, signature = written
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.safetensors",
        "model.stablehlo",
        "reload.py",
        "signature.json",
    ]
    assert json.loads((folder / "signature.json").read_text()) == signature
    assert (folder / "reload.py").read_bytes() == pathlib.Path(reload.__file__).read_bytes()
    tensors = safetensors.open_folder(folder)
    assert {n: list(t.shape) for n, t in tensors.items()} == {n: w["shape"] for n, w in signature["weights"].items()}
    assert np.array_equal(tensors["table.user"].read(), made.model.tables["user"])
    assert signature["features"]["pages"] == {"rows": 120, "length": None}
    assert signature["inputs"]["ids/shown"]["shape"] == ["batch", 2]
    assert signature["calling"]["platforms"] == ["cpu", "cuda", "tpu"]
    assert signature["dense"] == ["price", "age", "hour"]
    assert signature["step"] == 7


def test_the_packages_of_the_formats_read_the_files(written):
    _, folder, signature = written
    from safetensors.numpy import load_file

    assert {n: list(a.shape) for n, a in load_file(folder / "model.safetensors").items()} == {
        n: w["shape"] for n, w in signature["weights"].items()
    }
    assert (folder / "model.stablehlo").read_bytes()[:4] == b"ML\xefR"  # MLIR bytecode


def test_what_a_loaded_model_refuses(written):
    _, folder, _ = written
    model, one = reload.load(folder), click_cases.batch(4)
    good = given(one)
    cases = [
        ({k: v for k, v in good.items() if k != "user"}, one.dense, "feature 'user' is missing"),
        (good | {"color": [1]}, one.dense, "feature 'color' is not known"),
        (good | {"user": np.array([0, 1, 2, 300])}, one.dense, r"'user' must have ids in \[0, 300\)"),
        (good | {"pages": [[-1], [], [], []]}, one.dense, r"'pages' must have ids in \[0, 120\)"),
        (good | {"user": np.ones(4)}, one.dense, "'user' must have ids that are integers; got float64"),
        (good | {"shown": np.ones((4, 3), int)}, one.dense, r"must be \[B, 2\]"),
        (good | {"pages": [[1.5], [], [2.0], []]}, one.dense, "'pages' must have ids that are integers; got float64"),
        (good | {"pages": [[[1, 2]], [], [], []]}, one.dense, "'pages' must be a list of ids for each example"),
        (good | {"pages": [1, 2, 3, 4]}, one.dense, "'pages' must be a list of ids for each example"),
        (good, one.dense[:3], "Every input must have one number B"),
        (good, None, "Every input must have one number B"),
    ]
    for ids, dense, words in cases:
        with pytest.raises(ValueError, match=words):
            model(ids, dense)
    flat = good | {"pages": np.array([1, 2])}
    for lengths, words in (
        ({"pages": [1, 0, 0, 0]}, "lengths must be integers that add up"),
        ({"pages": [1.5, 0.5, 0, 0]}, "lengths must be integers that add up"),
        ({"pages": [2, 0, 0, 0], "user": [1, 1, 1, 1]}, "lengths: 'user' is no feature with a list of ids"),
        ({"pages": [2, 0, 0, 0], "page": [1, 1, 1, 1]}, "lengths: 'page' is no feature with a list of ids"),
    ):
        with pytest.raises(ValueError, match=words):
            model(flat, one.dense, lengths)
    assert model(flat, one.dense, {"pages": [1, 0, 0, 1]})["logits"].shape == (4, 1)


def test_a_damaged_or_newer_folder_is_refused(written, tmp_path):
    _, folder, _ = written
    for name in ("model.safetensors", "model.stablehlo", "reload.py"):
        shutil.copytree(folder, tmp_path / name)
        data = bytearray((tmp_path / name / name).read_bytes())
        data[-3] ^= 1
        (tmp_path / name / name).write_bytes(bytes(data))
        with pytest.raises(ValueError, match=f"{name}: is damaged"):
            reload.load(tmp_path / name)
    signature, path = json.loads((folder / "signature.json").read_text()), tmp_path / "reload.py" / "signature.json"
    path.write_text(json.dumps(signature | {"format": "scalejax click model 3"}))
    with pytest.raises(ValueError, match="has the format"):
        reload.load(path.parent)


def test_any_flipped_bit_of_a_signature_is_refused_or_says_the_same(written, tmp_path):
    _, folder, signature = written
    source = (folder / "signature.json").read_bytes()
    shutil.copytree(folder, tmp_path / "flipped")
    path = tmp_path / "flipped" / "signature.json"
    draw = np.random.default_rng(0)
    for at in draw.integers(0, len(source), 60):
        data = bytearray(source)
        data[at] ^= 1 << int(draw.integers(8))
        path.write_bytes(bytes(data))
        try:
            said = reload.load(path.parent).signature
        except ValueError as error:
            assert "is damaged" in str(error) or "has the format" in str(error)
        else:
            assert said == signature


def test_nothing_is_written_over(written):
    made, folder, _ = written
    with pytest.raises(UserError, match="is there already"):
        export.write(made, folder)


class Sorted:
    """A split in an order that says much of the label: the first three quarters are all negative."""

    def __init__(self, total=1000, size=64):
        self.total, self.size = total, size
        self.read = 0

    def num_examples(self, split):
        assert split == "validation"
        return self.total

    def eval_batches(self, split):
        for start in range(0, self.total, self.size):
            self.read += 1
            rows = np.arange(start, start + self.size)
            one = click_cases.batch(self.size, seed=start, labels=np.float32(rows >= 0.75 * self.total)[:, None])
            dense = np.repeat(rows[:, None].astype(np.float32), 3, axis=1)  # says which example it is
            yield dataclasses.replace(one, dense=dense, weights=np.float32(rows < self.total))


def test_a_sample_does_not_depend_on_the_order_of_the_file():
    data = Sorted()
    some = click_model.sample(data, "validation", click_cases.SCHEMA, 200)
    assert some.labels.shape == (200, 1)
    assert abs(some.labels.mean() - 0.25) < 0.1  # the first 200 are all negative
    assert {len(one.dense) for one in some.inputs} == {64}  # one program scores them all
    rows = np.concatenate([np.asarray(one.dense)[kept, 0] for one, kept in zip(some.inputs, some.kept, strict=True)])
    assert len(np.unique(rows)) == 200
    assert rows.max() > 900
    assert np.array_equal(some.labels[:, 0], rows >= 750)  # ids, numbers and labels are of one example
    again = click_model.sample(Sorted(), "validation", click_cases.SCHEMA, 200)
    assert np.array_equal(again.inputs[0].dense, some.inputs[0].dense)
    lengths = np.concatenate([np.asarray(one.lengths["pages"]) for one in some.inputs])
    wanted = [int(click_cases.batch(64, seed=int(r) // 64 * 64).features.lengths[2][int(r) % 64]) for r in rows]
    assert lengths[:200].tolist() == wanted


def test_a_sample_of_more_than_there_is_has_every_example():
    some = click_model.sample(Sorted(), "validation", click_cases.SCHEMA, 5000)
    assert len(some.labels) == 1000
