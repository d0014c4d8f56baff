"""The records of a run: equal files for equal runs, whatever interrupted them."""

import json
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from scalejax.errors import UserError
from scalejax.train.reports.events import EventWriter, to_line
from scalejax.train.run_folder import read_lines as read
from scalejax.train.trackers.tensorboard import TensorBoard

WINDOW = {"examples": 64, "logloss": 0.1 + 0.2, "ne": float("nan")}


def record_steps(folder, first, last, restored=0):
    folder.mkdir(exist_ok=True)
    with EventWriter(folder, step=restored, trackers=(TensorBoard().build(),)) as writer:
        for step in range(first, last + 1):
            writer.window(step, WINDOW | {"auc": step / 7})
            if step % 2 == 0:
                writer.evaluation(step, "validation", {"auc": np.float32(step / 3), "examples": np.int64(5)})
            writer.timing(step, {"wall_s": 0.5})


def test_lines_are_strict_json_with_exact_floats():
    values = {"a": 0.1 + 0.2, "b": np.float32(0.1), "c": float("inf"), "d": 3, "e": None, "f": np.int64(4), "g": "x"}
    line = to_line(values)
    assert json.loads(line) == {"a": 0.1 + 0.2, "b": float(np.float32(0.1)), "c": None} | {
        k: v for k, v in values.items() if k in "defg"
    }


def test_a_resumed_run_writes_the_same_file_as_an_uninterrupted_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    record_steps(whole, 1, 9)
    record_steps(broken, 1, 7)
    record_steps(broken, 5, 6, restored=4)
    record_steps(broken, 6, 9, restored=6)  # step 6 comes again: written once
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [r["attempt"] for r in read(broken / "timing.jsonl")] == [1] * 4 + [2] * 2 + [3] * 4


def test_a_run_that_restored_nothing_keeps_nothing(tmp_path):
    record_steps(tmp_path, 0, 3)
    record_steps(tmp_path, 0, 1)
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl") if r["kind"] == "window"] == [0, 1]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    record_steps(tmp_path, 1, 4)
    for name in ("metrics.jsonl", "timing.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"kind": "window", "st')
        assert len(read(tmp_path / name)) == (6 if name == "metrics.jsonl" else 4)
    record_steps(tmp_path, 5, 5, restored=4)
    assert read(tmp_path / "metrics.jsonl")[-1]["step"] == 5
    assert read(tmp_path / "timing.jsonl")[-1] == {"attempt": 2, "step": 5, "wall_s": 0.5}


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "window", "step": 1, "split": "train"}\n{"kind": "wi\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2"):
        EventWriter(tmp_path, step=1)


def test_processes_other_than_0_touch_nothing(tmp_path):
    with EventWriter(tmp_path / "never-made", process_index=1, step=3) as writer:
        writer.window(1, WINDOW)
        writer.evaluation(1, "test", WINDOW)
        writer.timing(1, {})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_holds_what_the_files_hold(tmp_path):
    record_steps(tmp_path, 1, 2)
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = read_events(path)
    assert events[0].file_version == "brain.Event:2"
    assert (events[1].step, events[1].session_log.status) == (1, 1)  # START: later events of other files are hidden
    scalars = {(e.step, value.tag): value.simple_value for e in events for value in e.summary.value}
    assert scalars[2, "train/auc"] == np.float32(2 / 7)
    assert scalars[2, "validation/examples"] == 5
    assert {tag for _, tag in scalars} == {  # without the NE, which is undefined
        "train/logloss", "train/auc", "train/examples", "validation/auc", "validation/examples", "timing/wall_s",
    }  # fmt: skip


def test_writers_that_begin_in_the_same_second_share_no_file(tmp_path):
    record_steps(tmp_path, 1, 1)
    record_steps(tmp_path, 2, 2, restored=1)
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    assert sorted(max(e.step for e in read_events(path)) for path in files) == [1, 2]


def read_events(path):
    """The records of an event file: length, its masked checksum, message, its masked checksum."""
    content, events = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        assert masked_crc32c(content[:8]) == int.from_bytes(content[8:12], "little")
        data = content[12 : 12 + size]
        assert masked_crc32c(data) == int.from_bytes(content[12 + size : 16 + size], "little")
        events.append(Event.FromString(data))
        content = content[16 + size :]
    return events


def masked_crc32c(data):
    """Of the TFRecord format, bit by bit: CRC-32C (polynomial 0x82F63B78 reflected), rotated and offset."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
