"""A run whose newest checkpoint is damaged goes on from the newest intact one, and says so."""

import io
import json
import shutil

import pytest
import rich.console
import small_run

from scalejax.errors import UserError
from scalejax.train import loop
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints

EVERY = Checkpoints(every=2, keep_last=20, keep_best=0)


def experiment(rows, **changes):
    """Full checkpoints at 2 and 8, those of touched rows at 4, 6 and 10, where `full_every` is 8."""
    given = {"checkpoints": EVERY, "steps": 10, "evaluation__every": 0, "log_every": 2}
    return small_run.experiment(rows, **given | changes)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("data") / "rows.parquet")


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """A function of "full" or "deltas": the folder of a run with such checkpoints, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")

    def run(form):
        if not (folder / form).exists():
            changes = {"tables__full_every": 8} if form == "deltas" else {}
            loop.train(experiment(rows, **changes), workdir=folder / form)
        return folder / form

    return run


def flip(path):
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def resumed(rows, run, **changes):
    """What a run that goes on from the folder ends with, and what it said."""
    console = rich.console.Console(record=True, width=300, file=io.StringIO())
    summary = loop.train(experiment(rows, **changes), workdir=run, console=console)
    return summary, console.export_text()


def back_to_intact(run):
    """The step from which a run would go on, and what is set aside for that."""
    with Checkpointer(run / "checkpoints", EVERY, {}) as checkpoints:
        return checkpoints.back_to_intact(), checkpoints.damaged()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "damage", "goes_on", "moved"),
    [
        ("full", {10: "arrays"}, 8, ["damaged-10"]),
        ("full", {10: "missing"}, 8, ["damaged-10"]),
        ("full", {10: "arrays", 8: "manifest.json"}, 6, ["damaged-10", "damaged-8"]),
        ("full", {8: "arrays"}, 10, []),
        ("deltas", {10: "rows", 8: "arrays", 4: "rows"}, 2, ["damaged-10", "damaged-4", "damaged-6", "damaged-8"]),
    ],
)
def test_it_goes_on_from_the_newest_intact_one_to_the_same_bits(rows, whole, tmp_path, form, damage, goes_on, moved):
    run = tmp_path / "run"
    shutil.copytree(whole(form), run)
    for step, part in damage.items():
        folder = run / "checkpoints" / str(step)
        if part == "missing":
            (folder / "manifest.json").unlink()
        else:
            flip(largest(folder / part) if (folder / part).is_dir() else folder / part)
    (run / "checkpoints" / "notes.txt").write_text("names that are no steps do not matter")
    (run / "checkpoints" / "0012").mkdir()
    summary, said = resumed(rows, run, **({"tables__full_every": 8} if form == "deltas" else {}))
    assert sorted(path.name for path in (run / "checkpoints").glob("damaged-*")) == moved
    assert (f"going on from step {goes_on}" in said) == bool(moved)
    assert summary.get("damaged_checkpoints", "") == ", ".join(moved)
    written = json.loads((run / "summary.json").read_text())
    assert written.get("damaged_checkpoints", "") == ", ".join(moved)
    assert (run / "metrics.jsonl").read_bytes() == (whole(form) / "metrics.jsonl").read_bytes()
    manifest, expected = (manifests.read(folder / "checkpoints" / "10") for folder in (run, whole(form)))
    assert manifest.host == expected.host
    assert manifest.arrays == expected.arrays
    if form == "deltas":
        loop.evaluate(experiment(rows), workdir=run)  # whatever stands beside it


@pytest.mark.slow
def test_without_an_intact_one_nothing_begins_anew(rows, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("full"), run)
    for folder in (run / "checkpoints").iterdir():
        flip(folder / "manifest.json")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint is intact \(2, 4, 6, 8, 10\); of the newest: .*10/manifest"):
        resumed(rows, run)
    assert not list((run / "checkpoints").glob("damaged-*"))
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_scoring_and_a_resume_that_must_refuse_a_damaged_one(rows, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("full"), run)
    flip(largest(run / "checkpoints" / "10"))
    with pytest.raises(UserError, match="newest intact checkpoint before it is step 8"):
        loop.train(experiment(rows), workdir=run, resume="must")
    with pytest.raises(UserError, match=r"checkpoints/10/.* is damaged"):
        loop.evaluate(experiment(rows), workdir=run)
    assert not list((run / "checkpoints").glob("damaged-*"))


@pytest.mark.slow
def test_a_checkpoint_under_the_name_of_another_step_is_damaged(rows, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("full"), run)
    shutil.rmtree(run / "checkpoints" / "10")
    (run / "checkpoints" / "8").rename(run / "checkpoints" / "10")
    with pytest.raises(UserError, match=r"checkpoints/10 holds the checkpoint of step 8"):
        loop.evaluate(experiment(rows), workdir=run)
    assert back_to_intact(run) == (6, ["damaged-10"])


@pytest.mark.slow
def test_damage_found_twice_keeps_both(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("full"), run)
    for damaged in (["damaged-10"], ["damaged-10", "damaged-10-2"]):
        newest = run / "checkpoints" / "10"
        shutil.copytree(whole("full") / "checkpoints" / "10", newest, dirs_exist_ok=True)
        flip(largest(newest))
        assert back_to_intact(run) == (8, damaged)
