"""Files of safetensors: written, read slice by slice, and refused where they are damaged."""

import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.models.llm import safetensors
from scalejax.models.llm.safetensors import Written

library = pytest.importorskip("safetensors.numpy", reason="the format's own package is not installed")


def arrays():
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b": (2, 3, 4), "c": (7,), "d": (), "e": (0, 3)}
    dtypes = {"a": np.float32, "b": ml_dtypes.bfloat16, "c": np.float16, "d": np.float64, "e": np.float32}
    return {name: np.asarray(rng.normal(size=shape), dtypes[name]) for name, shape in shapes.items()}


def write(folder, made, **more):
    plan = tuple(Written(name, a.dtype, a.shape) for name, a in made.items())
    safetensors.write_folder(folder, plan, made.__getitem__, **more)


def test_the_package_of_the_format_reads_what_is_written(tmp_path):
    made = {name: a for name, a in arrays().items() if name != "b"}  # without bfloat16, which it leaves to others
    write(tmp_path, made)
    found = library.load_file(tmp_path / "model.safetensors")
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in made.items()
    }


def test_what_the_package_of_the_format_writes_is_read(tmp_path):
    made = {name: a for name, a in arrays().items() if name != "b"}
    library.save_file(made, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name, tensor in safetensors.open_folder(tmp_path).items():
        np.testing.assert_array_equal(tensor.read(), made[name])


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_shards_hold_no_more_than_the_limit_unless_a_tensor_does(tmp_path, limit):
    made = arrays()
    told = []
    write(tmp_path, made, shard_bytes=limit, wrote=told.append)
    files = sorted(p for p in tmp_path.glob("*.safetensors"))
    found = safetensors.open_folder(tmp_path)
    for file in files:
        own = [made[name].nbytes for name, tensor in found.items() if tensor.file == file]
        assert sum(own) <= limit or len(own) == 1
    assert sum(told) == sum(a.nbytes for a in made.values())
    assert (tmp_path / safetensors.INDEX).exists() == (len(files) > 1)
    for name, array in made.items():
        assert found[name].read().tobytes() == array.tobytes()


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(data=st.data())
def test_a_slice_is_what_numpy_cuts(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    index = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
        if data.draw(st.booleans())
        else slice(None)
        for n in shape
    )
    whole = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("slices")
    write(folder, {"x": whole})
    with pytest.MonkeyPatch.context() as patch:
        # The two ways to read a slice, and blocks of a few rows.
        patch.setattr(safetensors, "_LEAST_RUN_BYTES", data.draw(st.sampled_from([0, 8, 10**9])))
        patch.setattr(safetensors, "_BLOCK_BYTES", 100)
        np.testing.assert_array_equal(safetensors.open_folder(folder)["x"].read(index), whole[index])


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


def header_of(content, change):
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:-1], "and should have"),
        (lambda c: c + b"x", "and should have"),
        (lambda c: b"\xff" * 8 + c[8:], "its header would be"),
        (lambda c: b"", "its header would be 0 of 0 bytes"),
        (lambda c: c[:8] + b"{" * (len(c) - 8), "is damaged or no safetensors file"),
        (lambda c: header_of(c, lambda h: h["a"].update(shape=[3, 4])), r"tensor a, F32 \(3, 4\), has 60 bytes"),
        (lambda c: header_of(c, lambda h: h["c"].update(data_offsets=[0, 14])), "overlap or leave a gap"),
        (lambda c: header_of(c, lambda h: h["a"].pop("dtype")), "'dtype'"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, words):
    write(tmp_path, arrays())
    damage(tmp_path / "model.safetensors", change)
    with pytest.raises(UserError, match=words):
        safetensors.open_folder(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    write(tmp_path, {"x": np.ones((4, 4), np.float32)})
    tensor = safetensors.open_folder(tmp_path)["x"]
    damage(tensor.file, lambda c: c[:-4])
    with pytest.raises(UserError, match="ends inside of tensor x"):
        tensor.read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f, i: (f / i["weight_map"]["a"]).unlink(), "which is missing. Copy the shard"),
        (lambda f, i: i["weight_map"].update(z=i["weight_map"]["a"]), "lacks z, which the index has there"),
        (
            lambda f, i: i["weight_map"].update(a=i["weight_map"]["c"], c=i["weight_map"]["a"]),
            "holds tensor a, which the index has in",
        ),
        (lambda f, i: i["weight_map"].update(a="../other.safetensors"), "which is not in the folder"),
        (lambda f, i: i.pop("weight_map"), "is no index of shards"),
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path, change, words):
    write(tmp_path, {name: a for name, a in arrays().items() if name in "ac"}, shard_bytes=1)
    index = json.loads((tmp_path / safetensors.INDEX).read_text())
    change(tmp_path, index)
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=words):
        safetensors.open_folder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [0, 10**30], "data_offsets": [0, 0]},
        {"shape": [0] * 70, "data_offsets": [0, 0]},
        {"shape": [1] * 70, "data_offsets": [0, 4]},
        {"shape": [1.9], "data_offsets": [0, 4]},
        {"shape": [True], "data_offsets": [0, 4]},
        {"shape": ["1"], "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4.5]},
    ],
)
def test_an_impossible_shape_is_refused(entry, tmp_path):
    header = json.dumps({"a": {"dtype": "F32"} | entry}).encode()
    data = bytes(int(entry["data_offsets"][1]))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(UserError, match="is damaged or no safetensors file: tensor a has shape"):
        safetensors.open_folder(tmp_path)


def test_an_index_may_name_a_file_that_no_disk_can(tmp_path):
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(UserError, match="which is missing"):
        safetensors.open_folder(tmp_path)


def test_a_folder_with_other_names_is_refused(tmp_path):
    write(tmp_path, {"x": np.ones(2, np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    with pytest.raises(UserError, match=r"has mine\.safetensors, but neither model\.safetensors nor"):
        safetensors.open_folder(tmp_path)
    (tmp_path / "mine.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        safetensors.open_folder(tmp_path)


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = safetensors.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(safetensors.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="needs 60 B and the disk has 10 B left"):
        write(tmp_path, {"a": arrays()["a"]})
    assert list(pathlib.Path(tmp_path).iterdir()) == []
