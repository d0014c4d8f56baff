import json
import pathlib
from collections.abc import Callable

import pytest

from scalejax import json_reading
from scalejax.cli import folders
from scalejax.data.kept_arrays import open_arrays
from scalejax.data.tables import clustered
from scalejax.errors import UserError
from scalejax.models.llm import model_folder, safetensors
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan
from scalejax.parallel.planner.topology import Constants
from scalejax.train import disk
from scalejax.train.checkpoints import manifest


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_a_hundred_levels_are_read_and_no_more() -> None:
    assert json_reading.parse(nested(json_reading.DEEPEST)) == json.loads(nested(json_reading.DEEPEST))
    for depth in (json_reading.DEEPEST + 2, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            json_reading.parse(nested(depth))


def test_a_file_beyond_the_limit_is_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text('{"a": [1, 2]}')
    assert json_reading.read(tmp_path / "a") == {"a": [1, 2]}
    monkeypatch.setattr(json_reading, "LARGEST_BYTES", 12)
    with pytest.raises(ValueError, match="larger than"):
        json_reading.read(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("experiment.json", lambda folder: folders.read_record(folder)),
        ("about", lambda folder: open_arrays(folder, "checksums")),
        ("clustered.json", lambda folder: clustered.read_manifest(folder)),
        ("config.json", lambda folder: model_folder._read_json(folder / "config.json")),
        ("model.safetensors.index.json", lambda folder: safetensors.open_folder(folder)),
        ("plan.json", lambda folder: ShardingPlan.load(folder / "plan.json")),
        ("constants.json", lambda folder: Constants.load(folder / "constants.json")),
        ("manifest.json", lambda folder: manifest.read(folder)),
        ("summary.json", lambda folder: disk.read_json(folder / "summary.json")),
    ],
)
def test_deeply_nested_json_is_a_mistake_and_not_a_crash(
    name: str, load: Callable[[pathlib.Path], object], tmp_path: pathlib.Path
) -> None:
    (tmp_path / name).write_text(nested(100_000))
    with pytest.raises(UserError, match=f"{name}|nested more than 100 deep"):
        load(tmp_path)
