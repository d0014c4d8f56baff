"""The report of a run folder, and of several, from files alone."""

import base64
import dataclasses
import html.parser
import io
import json
import re
import xml.etree.ElementTree

import numpy as np
import pytest
import rich.console

from scalejax.errors import UserError
from scalejax.train.metrics import evaluation, exact
from scalejax.train.metrics.protocol import Described, Value
from scalejax.train.reports import comparison, console, figures, page, report, summary
from scalejax.train.reports.events import EventWriter


def make_run(folder, *, tasks=("late",), seed=0, steps=500, noise=0.6, progressive=False, examples=1000):
    """A run folder as training leaves it, its figures invented."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(5).normal(-1.2, 1.1, (examples, len(tasks)))
    labels = (np.random.default_rng(6).random(truth.shape) < exact.sigmoid(truth)).astype(np.float32)
    predictions = exact.sigmoid(truth + rng.normal(0, noise, truth.shape))
    scored = evaluation.evaluate(predictions, labels, names=tasks, intervals="bootstrap", resamples=50)
    suffixes = [f"/{name}" for name in tasks] if len(tasks) > 1 else [""]
    with EventWriter(folder) as events:
        for step in range(25, steps + 1, 25):
            part = step / steps
            values = {"examples": 25 * 1024, "learning_rate": 1e-3 * min(1, 10 * part) * (1 + np.cos(np.pi * part)) / 2}
            for i, suffix in enumerate(suffixes):
                loss = 0.46 + 0.12 * np.exp(-6 * part) + 0.4 * np.exp(-150 * part) + rng.normal(0, 0.004) + 0.02 * i
                values |= {f"logloss{suffix}": loss, f"ne{suffix}": loss / 0.53, f"calibration{suffix}": 1.01}
                values |= {f"base_rate{suffix}": 0.24, f"auc_hist{suffix}": 0.78 - 0.4 * (loss - 0.46)}
                values |= {f"auc_error_bound{suffix}": 0.0011, f"nonfinite{suffix}": 0}
            if progressive and step % 50 == 0:
                events.evaluation(step - 1, f"2013-{step // 50:02d}-01", values)
            events.window(step, values)
            if step % 100 == 0:
                late = {k: v + 0.01 * np.exp(-6 * part) if "loss" in k or "ne" in k else v for k, v in scored.items()}
                events.evaluation(step, "validation", late)
            wait = 0.06 + 0.02 * rng.random()
            events.timing(
                step,
                {
                    "steps": 25, "examples": 25600, "wall_s": 0.34, "samples_per_s": 25600 / 0.34,
                    "step_mean_s": 0.0068, "step_p50_s": 0.0061 + 0.0004 * rng.random(),
                    "step_p95_s": 0.0095 + 0.002 * rng.random(), "data_wait_share": wait / 0.34, "data_wait_s": wait,
                    "dispatch_s": 0.03, "blocked_s": 0.2, "checkpoint_s": 0.02 if step % 250 == 0 else 0.0,
                    "compile_s": 4.2 if step == 25 else 0.0, "evaluation_s": 0.5 if step % 100 == 25 else 0.0,
                },
            )  # fmt: skip
        events.evaluation(steps, "test", scored)
    evaluation.save_diagrams(folder, "test", predictions, labels, names=tasks)
    closing = {
        "recipe": "wukong", "date": "2026-01-31", "device": "1 x cpu", "mesh": "fsdp=8", "steps": steps,
        "examples": steps * 1024, "dense_parameters": 212_345, "table_parameters": 1_234_567,
        **summary.of_evaluation("test", scored), "samples_per_s": 151_234.5, "step_p50_s": 0.0063,
        "step_p95_s": 0.0104, "data_wait_share": 0.21, "compile_s": 4.2, "wall_s": 25.3, "peak_rss_bytes": 812_000_000,
    }  # fmt: skip
    environment = {
        "scalejax": "0.1.0", "commit": "0123456789abcdef", "python": "3.11.2", "packages": {"jax": "0.10.2"},
        "devices": {"kind": "cpu", "platform": "cpu", "count": 1}, "mesh": {"fsdp": 8},
        "started": "2026-01-31T12:00:00+00:00",
    }  # fmt: skip
    model = {"type": "scalejax.models.recsys.wukong.WukongConfig", "fields": {"layers": 4, "dim": 32, "seed": seed}}
    experiment = {"type": "scalejax.train.experiment.Experiment", "fields": {"model": model, "steps": steps}}
    record = {"recipe": "wukong", "sets": ["steps=500"], "experiment": experiment}
    for name, content in (("summary", closing), ("environment", environment), ("experiment", record)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class _Tags(html.parser.HTMLParser):
    """Checks that every tag is closed in order and notes what could be loaded from elsewhere."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.pictures, self.texts = [], [], [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe")
        for name, value in attributes:
            if name in ("src", "href"):
                self.sources.append(value)
            assert not name.startswith("on")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def check_page(path):
    """The page is well formed and complete in itself; returns its text and its pictures."""
    tags = _Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    assert tags.open == []
    pictures = []
    for source in tags.sources:
        assert source.startswith("data:image/svg+xml;base64,")
        svg = base64.b64decode(source.partition(",")[2]).decode()
        xml.etree.ElementTree.fromstring(svg)
        assert not re.search(r'(href|src)="(?!#)', svg)
        assert "#010203" not in svg
        pictures.append(svg)
    return " ".join(tags.texts), pictures


@pytest.mark.slow
def test_a_finished_run_has_everything(tmp_path):
    text, pictures = check_page(report.write_report(make_run(tmp_path / "run", progressive=True)))
    assert len(pictures) == 4 + 3 + 2 + 2  # curves, progressive, predictions, time
    for part in ("wukong", "1 x cpu", "fsdp=8", "test AUC", "base rate 0.5000", "151,234", "812 MB", "model.layers"):
        assert part in text
    assert "validation" in pictures[0]


@pytest.mark.slow
def test_pictures_of_metrics_are_shown_with_their_captions(tmp_path):
    folder = make_run(tmp_path / "run")
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle r="4"/></svg>'
    picture = evaluation.Picture(split="test", name="overlays", caption="Truth and prediction.", svg=svg)
    evaluation.save_picture(folder, picture)
    assert evaluation.read_pictures(folder) == [picture]
    text, pictures = check_page(report.write_report(folder))
    assert "Truth and prediction. (test)" in text
    assert svg in pictures
    with pytest.raises(ValueError, match="letters, digits"):
        evaluation.save_picture(folder, dataclasses.replace(picture, name="../x"))
    (folder / "evaluation" / "pictures" / "test-overlays.json").write_text("{")
    with pytest.raises(UserError, match=r"test-overlays\.json is damaged"):
        report.write_report(folder)


def test_what_a_run_measures_comes_from_its_folder(tmp_path):
    dice = Value(name="dice", title="Dice", unit="mean over cases, higher is better", better="high")
    described = Described(values=(dice,), counts=("cases", "volumes"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "measures.json").write_text(json.dumps(described.to_dict()))
    (folder / "summary.json").write_text(json.dumps({"recipe": "mine", "test_dice": 0.81, "test_cases": 12}))
    with EventWriter(folder) as events:
        events.window(1, {"dice": 0.2})
        events.evaluation(1, "test", {"dice": 0.81})
    text, pictures = check_page(report.write_report(folder))
    assert "test: 12 volumes" in text
    assert "0.8100" in text
    assert "Dice: mean over cases, higher is better." in text
    assert len(pictures) == 1
    (folder / "measures.json").write_text("{}3")
    with pytest.raises(UserError, match=r"measures\.json is damaged"):
        report.write_report(folder)


@pytest.mark.slow
def test_equal_folders_give_equal_reports(tmp_path):
    first, second = (report.write_report(make_run(tmp_path / name / "run")).read_bytes() for name in "ab")
    assert first == second


@pytest.mark.slow
def test_tasks_are_shown_apart(tmp_path):
    text, pictures = check_page(report.write_report(make_run(tmp_path / "run", tasks=("click", "buy"))))
    assert len(pictures) == 2 * 3 + 1 + 2 * 2 + 2
    assert "test, click" in text
    assert "test, buy" in text


def test_a_stopped_run_reports_what_it_did(tmp_path):
    folder = make_run(tmp_path / "run")
    for name in ("summary.json", "environment.json", "timing.jsonl"):
        (folder / name).unlink()
    text, _ = check_page(report.write_report(folder))
    assert "has not finished" in text
    assert "step 500" in text


def test_undefined_values_are_gaps_and_not_errors(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with EventWriter(folder) as events:
        for step in (1, 2, 3):
            bad = float("nan")
            events.window(step, {"examples": 4, "logloss": 0.5 if step == 2 else bad, "ne": bad, "auc_hist": bad})
    text, _ = check_page(report.write_report(folder))
    assert "has not finished" in text


def test_names_are_escaped(tmp_path):
    folder = make_run(tmp_path / "run")
    closing = json.loads((folder / "summary.json").read_text()) | {"recipe": "<script>alert(1)</script>"}
    (folder / "summary.json").write_text(json.dumps(closing))
    text, _ = check_page(report.write_report(folder))
    assert "alert(1)" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        report.write_report(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        report.write_report(tmp_path)


def test_a_comparison_claims_only_what_the_interval_allows(tmp_path):
    folders = [
        make_run(tmp_path / name, noise=noise, seed=seed)
        for name, noise, seed in (("base", 0.6, 0), ("same", 0.6, 0), ("good", 0.1, 1))
    ]
    path = comparison.write_comparison(folders)
    assert path == tmp_path / "comparison.html"
    text, pictures = check_page(path)
    assert len(pictures) == 3
    assert text.count("better") == 3
    assert text.count("no difference shown") == 3
    assert "model.seed" in text
    assert "model.layers" not in text


def test_runs_scored_on_other_examples_are_not_judged(tmp_path):
    folders = [make_run(tmp_path / name, examples=n) for name, n in (("a", 500), ("b", 600))]
    text, _ = check_page(comparison.write_comparison(folders, tmp_path / "out.html"))
    assert "scored on other examples" in text
    (folders[1] / "evaluation" / "test.npz").unlink()
    text, _ = check_page(comparison.write_comparison(folders))
    assert "no predictions were kept" in text
    assert "better" not in text


def test_a_comparison_needs_two_different_runs(tmp_path):
    folder = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="two run folders"):
        comparison.write_comparison([folder])
    with pytest.raises(UserError, match="twice"):
        comparison.write_comparison([folder, folder])


def test_the_closing_table_stands_beside_the_base_rate(tmp_path):
    closing = json.loads((make_run(tmp_path / "run") / "summary.json").read_text())
    out = rich.console.Console(width=100, record=True, file=io.StringIO())
    out.print(console.closing_table(closing))
    lines = out.export_text().splitlines()
    row = next(line for line in lines if "AUC" in line).split()
    assert row == ["AUC", f"{closing['test_auc']:.4f}", f"{closing['test_auc_low']:.4f}", "to",
                   f"{closing['test_auc_high']:.4f}", "0.5000"]  # fmt: skip
    loss = next(line for line in lines if "LogLoss" in line).split()
    c = closing["test_base_rate"]
    assert loss[-1] == f"{-(c * np.log(c) + (1 - c) * np.log(1 - c)):.4f}"
    assert any("peak RSS" in line and "812 MB" in line for line in lines)


def test_summary_texts():
    assert [summary.duration(s) for s in (0.0123, 1.5, 200, 8000)] == ["12.3 ms", "1.5 s", "3 min 20 s", "2 h 13 min"]
    assert summary.size(1.5e9) == "1.50 GB"
    assert summary.prefix("validation") == "val"
    assert [console.count(n) for n in (5, 1234, 1.5e6, float("nan"))] == ["5", "1.23k", "1.5M", "?"]


def test_columns_that_are_empty_in_every_row_are_left_out():
    head = ["", ("value", "n"), ("95 % interval", "n"), ("base rate", "n")]
    table = page.table(head, [["AUC", ("0.7", "n"), ("", "n dim"), ("0.5", "n dim")], ["NE", ("0.9", "n")]])
    assert "95 % interval" not in table
    assert table.count("<th") == 1 + 3  # <thead too
    assert "0.5" in table
    shown = io.StringIO()
    drawn = console.closing_table({"test_loss": 1.5, "steps": 4}, Described.from_dict(LOSS))
    rich.console.Console(file=shown, width=100).print(drawn)
    assert "1.5000" in shown.getvalue()
    assert "interval" not in shown.getvalue()
    assert "base rate" not in shown.getvalue()


LOSS = Described(values=(Value(name="loss", title="loss", better="low"),), counts=("weight", "targets")).to_dict()


def _marks(svg, colour):
    """Marks of a colour, the one in the legend left out."""
    return max(0, len(re.findall(rf"<use [^>]*{colour}", svg)) - 1)


def test_points_of_groups_have_their_names_and_colours():
    names = ["shop", "hour", "item", "a<b"]
    svg = figures.groups("Groups", np.arange(8.0).reshape(4, 2), names, [0, 0, 1, 9])
    root = xml.etree.ElementTree.fromstring(svg)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(names) | {"Groups", "0", "1", "9"} <= {text.strip() for text in texts}
    assert svg == figures.groups("Groups", np.arange(8.0).reshape(4, 2), names, [0, 0, 1, 9])
    assert all(svg.count(f"fill: {colour}") for colour in figures.COLOURS[:2])


def test_few_points_are_marked_and_many_are_a_line():
    blue, orange = figures.COLOURS[:2]
    for windows, evaluations in ((1, 1), (2, 2), (200, 3), (200, 100)):
        points = [(float(step), 1 / step) for step in range(1, 1 + max(windows, evaluations))]
        svg = figures.curve("Loss", points[:windows], {"validation": points[-evaluations:]})
        assert _marks(svg, blue) == (windows if windows < 30 else 0)
        assert _marks(svg, orange) == (evaluations if evaluations < 30 else 0)
    # Splits that are scored at the same step with nearly the same value are told apart by shape.
    svg = figures.curve("Loss", [], {"validation": [(4, 0.5)], "test": [(4, 0.5)]})
    shapes = {path for path in re.findall(r'<path id="m\w+" d="([^"]+)" style="stroke: #', svg)}
    assert len(shapes) >= 2


@pytest.mark.slow
def test_tables_are_not_cut_off_on_a_phone(tmp_path):
    """What was wider than a card at 390 pixels scrolled there with no sign of it; cells break lines now."""
    (narrow,) = re.findall(r"@media\(max-width:600px\)\{(.*?\})\}", page.document("", []).replace("\n", ""))
    assert re.search(r"td\.n,th\.n,td\.key\{white-space:normal\}", narrow)
    assert "td.key{overflow-wrap:anywhere}" in narrow
    html_text = report.write_report(make_run(tmp_path / "run")).read_text()
    assert html_text.count("<table>") == html_text.count('<div class="scroll"><table>')
    assert 'name="viewport" content="width=device-width' in html_text


def test_progress_fields_leave_out_what_is_unknown():
    assert console.progress_fields() == {"rate": "", "quality": ""}
    fields = console.progress_fields(rate="123k examples/s", logloss=0.45678, auc=0.7654)
    assert fields == {"rate": "123k examples/s", "quality": "logloss 0.4568  auc 0.7654"}
    assert len(console.progress_columns()) == 8
