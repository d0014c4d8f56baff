"""Checkpoints: what comes back is what was saved; what is damaged, foreign or half-written never comes back."""

import contextlib
import errno
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalejax.errors import UserError
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.checkpoint import Checkpointer, retained
from scalejax.train.experiment import Checkpoints

WORKER = pathlib.Path(__file__).with_name("checkpoint_worker.py")
IDENTITY = {"model": "Wukong(width=8)", "data": "sha256:aa"}


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    count = int(np.prod(shape))
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:count])


MESHES = {"8": (mesh_of(8), PartitionSpec("a")), "1": (mesh_of(1), PartitionSpec("a"))}
MESHES["2x4"] = (mesh_of(2, 4), PartitionSpec("b", "a"))


def make_tree(mesh: str, seed: int = 0) -> dict:
    """Tables, moments, keys, counters: every kind of leaf a training state has, with awkward names."""
    rng = np.random.default_rng(seed)
    host = {
        "dense": {"kernel": rng.standard_normal((16, 8), np.float32), "half": rng.standard_normal((8, 8), np.float32)},
        "tables": {"user id/raw": {"rows": rng.standard_normal((1001, 4), np.float32)}},
        "moments": (rng.standard_normal((16, 8), np.float32), np.int32(7)),
        "empty": np.zeros((0, 4), np.float32),
        "nan": np.array([np.nan, -0.0, np.inf, 1e-42], np.float32),
    }
    host["dense"]["half"] = host["dense"]["half"].astype(jnp.bfloat16)
    tree = {**host, "key": jax.random.split(jax.random.key(seed), 3)}
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding_of(leaf, mesh)), tree)


def sharding_of(leaf, mesh: str) -> NamedSharding:
    shape, (devices, spec) = np.shape(leaf), MESHES[mesh]
    divides = len(shape) == 2 and shape[0] % 8 == 0 and shape[0] > 0
    return NamedSharding(devices, spec if divides else PartitionSpec())


def abstract(tree, mesh: str):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x, mesh)), tree)


def bits(leaf) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert bits(got) == bits(wanted)


def small(step: int) -> dict:
    return {"x": jnp.full((4,), step, jnp.float32)}


SMALL = {"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}


@pytest.fixture
def make(tmp_path):
    """Makes checkpointers of one folder and closes them."""
    made = []

    def one(identity=IDENTITY, better="low", **policy) -> Checkpointer:
        made.append(Checkpointer(tmp_path / "checkpoints", Checkpoints(**policy), identity, better=better))
        return made[-1]

    yield one
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.parametrize(("saved_on", "restored_on"), [("8", "1"), ("1", "8"), ("8", "2x4"), ("2x4", "8")])
def test_comes_back_to_the_bit_on_any_mesh(make, saved_on, restored_on):
    tree, host = make_tree(saved_on), {"examples": 2**40, "seed": 3, "nested": {"a": [1.5, None, "x"]}}
    make().save(5, tree, host)
    make().wait()
    checkpointer = make()
    while checkpointer.latest() is None:  # another object of the same process: the first one still commits
        time.sleep(0.01)
    restored, restored_host = checkpointer.restore(None, abstract(tree, restored_on))
    assert_same_bits(restored, tree)
    assert restored_host == host
    for leaf in jax.tree.leaves(restored):
        if leaf.ndim == 2 and leaf.shape[0] % 8 == 0 and leaf.size:
            assert leaf.sharding.is_equivalent_to(sharding_of(leaf, restored_on), 2)


def test_arrays_may_be_donated_as_soon_as_save_returns(make):
    tree = make_tree("8")
    expected = jax.tree.map(lambda x: jnp.array(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    expected = {name: expected[name] for name in ("dense", "tables")}
    donated = {name: tree[name] for name in ("dense", "tables")}
    checkpointer = make()
    checkpointer.save(1, donated, {})
    after = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)(donated)
    jax.block_until_ready(after)
    restored, _ = checkpointer.restore(1, abstract(expected, "8"))
    assert_same_bits(restored, expected)


def test_host_values_are_copied_when_save_returns(make):
    checkpointer, host = make(), {"examples": [1]}
    checkpointer.save(1, small(1), host)
    host["examples"].append(2)
    assert checkpointer.restore(1, SMALL)[1] == {"examples": [1]}


def test_keeps_the_last_and_the_best(make):
    checkpointer = make(keep_last=2, keep_best=1, best_metric="auc", better="high")
    aucs = {1: 0.6, 2: None, 3: 0.9, 4: 0.7, 5: None, 6: 0.8, 7: None}
    for step, auc in aucs.items():
        checkpointer.save(step, small(step), {}, None if auc is None else {"auc": auc, "logloss": 0.1})
    checkpointer.wait()
    assert checkpointer.steps() == [3, 6, 7]
    assert checkpointer.metrics(3) == {"auc": 0.9, "logloss": 0.1}
    assert checkpointer.metrics(7) is None
    assert sorted(path.name for path in checkpointer.folder.iterdir()) == ["3", "6", "7"]


def test_without_a_named_metric_the_first_one_counts(make):
    checkpointer = make(keep_last=1, keep_best=1, better="high")
    for step, accuracy in {1: 0.6, 2: 0.9, 3: 0.7}.items():
        checkpointer.save(step, small(step), {}, {"accuracy": accuracy})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 3]


@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.sampled_from([0.1, 0.2, 0.3, float("nan"), float("inf")])),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["low", "high"]),
)
@settings(max_examples=200, deadline=None)
def test_retention_equals_its_definition(scores, keep_last, keep_best, direction):
    kept = retained(scores, Checkpoints(keep_last=keep_last, keep_best=keep_best), direction)
    for step, score in scores.items():
        newer = sum(other > step for other in scores)
        if score is None or score != score:
            is_best = False
        else:
            rivals = [(s, o) for o, s in scores.items() if s is not None and s == s and o != step]
            better = sum(
                (s < score if direction == "low" else s > score) or (s == score and o < step) for s, o in rivals
            )
            is_best = better < keep_best
        assert (step in kept) == (newer < keep_last or is_best)


@pytest.mark.parametrize(
    ("policy", "field"), [({"keep_last": 0}, "checkpoints.keep_last"), ({"keep_best": -1}, "checkpoints.keep_best")]
)
def test_refuses_a_policy_that_keeps_nothing(tmp_path, policy, field):
    with pytest.raises(UserError, match=field):
        Checkpointer(tmp_path, Checkpoints(**policy), {})


def test_refuses_a_step_that_is_not_newer(make):
    make().save(3, small(3), {})
    checkpointer = make()
    while checkpointer.latest() is None:
        time.sleep(0.01)
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"greater than the latest, 3; got {step}"):
            checkpointer.save(step, small(step), {})


@pytest.mark.parametrize(
    ("tree", "host", "metrics", "match"),
    [
        ({"x": np.zeros(3)}, {}, None, "x must be a jax.Array; got ndarray"),
        ({"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}, {}, None, "same name"),
        ({"x": jnp.zeros(1)}, {"no": object()}, None, "not JSON serializable"),
        ({"x": jnp.zeros(1)}, {}, {"auc": 0.5}, "metrics must hold 'logloss'"),
    ],
)
def test_refuses_what_it_could_not_restore(make, tree, host, metrics, match):
    checkpointer = make(best_metric="logloss")
    with pytest.raises((ValueError, TypeError), match=match):
        checkpointer.save(1, tree, host, metrics)
    assert checkpointer.steps() == []


def test_says_that_there_is_nothing_to_restore(make):
    with pytest.raises(UserError, match="holds no checkpoint"):
        make().restore(None, SMALL)
    checkpointer = make()
    checkpointer.save(10, small(10), {})
    checkpointer.wait()
    with pytest.raises(UserError, match=r"no checkpoint of step 11; it has 10\."):
        checkpointer.restore(11, SMALL)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda t: {**t, "x": jax.ShapeDtypeStruct((5,), jnp.float32)},
            "x is float32[4] in the checkpoint and float32[5] here",
        ),
        (
            lambda t: {**t, "x": jax.ShapeDtypeStruct((4,), jnp.int32)},
            "x is float32[4] in the checkpoint and int32[4] here",
        ),
        (lambda t: {**t, "y": t["x"]}, "y float32[4] is not in the checkpoint"),
        (lambda t: {"key": t["key"]}, "x float32[4] is only in the checkpoint"),
        (
            lambda t: {**t, "key": jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))},
            "key is key<fry>[] in the checkpoint and key<rbg>[] here",
        ),
    ],
)
def test_another_model_is_refused_naming_what_differs(make, change, expected):
    checkpointer = make()
    checkpointer.save(1, {**small(1), "key": jax.random.key(0)}, {})
    with pytest.raises(UserError) as error:
        checkpointer.restore(1, change({**SMALL, "key": jax.eval_shape(lambda: jax.random.key(0))}))
    assert expected in str(error.value)
    assert "begin a new run in another --workdir" in str(error.value)


def test_other_data_is_refused_naming_both(make):
    checkpointer = make()
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    long = "Wukong(" + "layers=8, " * 30 + "width={})"
    for identity, expected in [
        ({**IDENTITY, "data": "sha256:bb"}, "data is 'sha256:aa' in the checkpoint and 'sha256:bb' here"),
        ({**IDENTITY, "schema": "x"}, "schema is absent in the checkpoint and 'x' here"),
        ({**IDENTITY, "model": long.format(9)}, "model is 'Wukong(width=8)' in the checkpoint and 'Wukong(layers=8"),
    ]:
        with pytest.raises(UserError) as error:
            make(identity).restore(1, SMALL)
        assert expected in str(error.value)


def test_the_excerpt_of_a_long_identity_shows_the_difference():
    one, two = ("a" * 500 + word + "b" * 500 for word in ("left", "right"))
    assert "left" in manifests.excerpt(one, two)
    assert "right" in manifests.excerpt(two, one)
    assert len(manifests.excerpt(one, two)) < 80


def test_a_newer_format_is_refused_by_its_number(make, monkeypatch):
    checkpointer = make()
    with monkeypatch.context() as future:
        future.setattr(manifests, "_FULL_VERSION", 4)
        checkpointer.save(1, small(1), {})
        checkpointer.wait()
    with pytest.raises(UserError, match=r"has format 4 and this scalejax reads up to 3.*Upgrade"):
        checkpointer.restore(1, SMALL)


def test_a_flipped_bit_in_any_file_is_noticed_and_the_intact_step_named(make):
    checkpointer = make(keep_last=3, keep_best=0)
    tree = make_tree("8")
    for step in (1, 2):
        checkpointer.save(step, tree, {"step": step})
    checkpointer.wait()
    rng = random.Random(0)
    target = abstract(tree, "1")
    files = [path for path in sorted((checkpointer.folder / "2").rglob("*")) if path.is_file()]
    assert {path.name for path in files} >= {"manifest.json", "_METADATA", "manifest.ocdbt"}
    for path in files:
        intact = path.read_bytes()
        if not intact:
            continue
        at = rng.randrange(len(intact) // 4, len(intact))  # of manifest.json: not in the indentation before the digest
        while path.name == "manifest.json" and intact[at : at + 1].isspace():
            at = rng.randrange(len(intact))
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1 << rng.randrange(7)]) + intact[at + 1 :])
        with pytest.raises(UserError) as error:
            checkpointer.restore(None, target)
        message = str(error.value)
        assert str(path) in message
        assert "damaged" in message
        assert "newest intact checkpoint before it is step 1" in message
        assert f"move the folder {checkpointer.folder / '2'} away" in message
        path.write_bytes(intact)
    assert_same_bits(checkpointer.restore(1, target)[0], tree)
    assert_same_bits(checkpointer.restore(2, target)[0], tree)


def test_moving_a_damaged_checkpoint_away_goes_on_from_the_one_before(make):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, small(step), {})
    checkpointer.wait()
    next((checkpointer.folder / "2").rglob("_METADATA")).unlink()
    with pytest.raises(UserError, match=r"_METADATA is missing\. The newest intact checkpoint before it is step 1"):
        checkpointer.restore(None, SMALL)
    (checkpointer.folder / "2").rename(checkpointer.folder / "damaged-2")
    checkpointer = make()
    assert float(checkpointer.restore(None, SMALL)[0]["x"][0]) == 1
    checkpointer.save(2, small(2), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert (checkpointer.folder / "damaged-2").exists()


def test_says_so_when_no_earlier_checkpoint_is_intact(make):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, small(step), {})
    checkpointer.wait()
    for step in ("1", "2"):
        path = checkpointer.folder / step / "manifest.json"
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="No earlier checkpoint is intact"):
        checkpointer.restore(None, SMALL)


def test_remains_of_a_killed_save_are_not_listed_and_only_a_writer_removes_them(make):
    checkpointer = make()
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    remains = [checkpointer.folder / "saving-2", checkpointer.folder / "removing-0"]
    for path in remains:
        shutil.copytree(checkpointer.folder / "1", path)
    reader = make()
    assert reader.steps() == [1]
    reader.restore(None, SMALL)
    assert all(path.exists() for path in remains)
    writer = make()
    writer.save(2, small(2), {})
    writer.wait()
    assert writer.steps() == [1, 2]
    assert not any(path.exists() for path in remains)


@pytest.mark.parametrize("scored", [False, True], ids=["save", "scores"])
def test_what_cannot_be_removed_is_no_failure_to_save(tmp_path, monkeypatch, scored):
    def refuse(_from, to):
        if pathlib.Path(to).name.startswith("removing-"):
            raise PermissionError(errno.EACCES, "no", str(to))
        return rename(_from, to)

    rename = os.rename
    monkeypatch.setattr(os, "rename", refuse)
    checkpointer = Checkpointer(tmp_path / "c", Checkpoints(keep_last=1), IDENTITY)
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    checkpointer.save(2, small(2), {})
    if scored:
        with contextlib.suppress(UserError):
            checkpointer.wait()
        checkpointer.add_scores(2, {}, {"loss": 1.0})
    with pytest.raises(UserError, match=r"checkpoint .*/2 is complete, but those before it cannot be removed: no perm"):
        checkpointer.wait()
    monkeypatch.undo()
    assert checkpointer.steps() == [1, 2]
    assert_same_bits(checkpointer.restore(2, SMALL)[0], small(2))


def test_an_error_inside_the_block_lets_the_save_finish(tmp_path):
    def save_and_fail():
        with Checkpointer(tmp_path / "c", Checkpoints(), IDENTITY) as checkpointer:
            checkpointer.save(1, small(1), {})
            raise KeyError

    with pytest.raises(KeyError):
        save_and_fail()
    assert Checkpointer(tmp_path / "c", Checkpoints(), IDENTITY).steps() == [1]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_NUM_CPU_DEVICES": "2"}


@pytest.mark.slow
def test_saving_is_silent(tmp_path):
    command = [sys.executable, str(WORKER), "save", str(tmp_path / "c"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "committed 1\ncommitted 2\ncommitted 3\n", "")


def kill_and_check(folder: pathlib.Path, kills: int, seed: int) -> None:
    """Kills a process that does nothing but save, at random moments, and restores whatever it left."""
    rng = random.Random(seed)
    committed = 0
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, str(WORKER), "save", str(folder)], stdout=subprocess.PIPE, text=True, env=environment()
        ) as process:
            assert process.stdout is not None
            lines = list(itertools.islice(process.stdout, 1))
            time.sleep(rng.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        said = [int(line.split()[1]) for line in lines if line.endswith("\n")]
        assert said[0] == committed + 1, "went on from somewhere else than the newest checkpoint"
        subprocess_steps = Checkpointer(folder, Checkpoints(), {"model": "worker"})
        steps = subprocess_steps.steps()
        committed = steps[-1]
        # The rename comes before the print, and the removal of the oldest after the rename.
        assert committed in (said[-1], said[-1] + 1)
        assert len(steps) in (1, 2, 3)
        target = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for step in steps:
            tree, host = subprocess_steps.restore(
                step,
                {
                    "rows": jax.ShapeDtypeStruct((2000, 16), jnp.float32, sharding=target),
                    "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=target),
                },
            )
            expected = np.random.default_rng(step).standard_normal((2000, 16), np.float32)
            assert (host, int(tree["step"])) == ({"step": step}, step)
            np.testing.assert_array_equal(np.asarray(tree["rows"]), expected)
        subprocess_steps.close()


@pytest.mark.slow
def test_killed_at_random_moments_leaves_only_checkpoints_that_restore(tmp_path):
    kill_and_check(tmp_path / "c", kills=3, seed=0)


@pytest.mark.slow
def test_killed_sixteen_times_leaves_only_checkpoints_that_restore(tmp_path):
    kill_and_check(tmp_path / "c", kills=16, seed=1)


def in_small_disk(folder: pathlib.Path, size: str, then: str, *command: str) -> subprocess.CompletedProcess:
    """Runs a command with a file system of its own at `folder`, which vanishes with the command."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    isolate = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size={size} none {folder}"
    if subprocess.run([*isolate, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this system does not let tests mount a file system of their own")
    script = f'{mount} && {then} && exec "$@"'
    return subprocess.run(
        [*isolate, "sh", "-c", script, "sh", *command], capture_output=True, text=True, timeout=120, env=environment()
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", ["200k", "800k"])
def test_a_full_disk_is_one_message_and_earlier_checkpoints_stay_usable(tmp_path, size):
    done = in_small_disk(tmp_path, size, "true", sys.executable, str(WORKER), "fill", str(tmp_path / "c"))
    lines = done.stdout.splitlines()
    refused = next(line for line in lines if line.startswith("refused: "))
    kept = [line.split()[1] for line in lines if line.startswith("committed")]
    assert done.returncode == 2, done.stderr
    assert "cannot save checkpoint" in refused
    assert "the disk is full" in refused
    assert "Free some space" in refused
    assert len(kept) >= 1
    assert f"intact {' '.join(kept)}" in lines  # the worker has restored and compared them
    assert done.stderr == ""


@pytest.mark.slow
def test_a_read_only_disk_is_one_message(tmp_path):
    then = f"mount -o remount,ro {tmp_path}"
    done = in_small_disk(tmp_path, "1m", then, sys.executable, str(WORKER), "fill", str(tmp_path / "c"))
    assert done.returncode == 2, done.stderr
    assert "the file system is read-only" in done.stdout
    assert done.stderr == ""
