"""What is said of an exchange that compresses: curves, and a warning where what it remembers grows and grows."""

import io
import json

import rich.console

from scalejax.train.reports import exchange, progress, report, summary
from scalejax.train.reports.events import EventWriter


def windows(*values):
    return [(10 * (number + 1), value) for number, value in enumerate(values)]


GROWS = [0.1 * n for n in range(1, exchange.GROWING + 2)]
"""One more than it takes to grow so often."""


def test_a_value_that_grows_often_enough_is_named_once():
    (text,) = exchange.warnings(windows(*GROWS, *(2 + n for n in range(5))))
    assert "has grown for 10 windows in a row, from 0.1 at step 10 to 1.1 at step 110" in text
    assert not exchange.warnings(windows(*GROWS[:-1]))
    assert len(exchange.warnings(windows(*GROWS, 0.5, *GROWS))) == 2


def test_a_value_that_falls_stays_or_lacks_ends_a_row():
    for between in (0.1, GROWS[4], None, float("nan")):
        assert not exchange.warnings(windows(*GROWS[:5], between, *GROWS[5:]))


def test_a_report_has_the_warning_the_curves_and_the_last_values(tmp_path):
    with EventWriter(tmp_path) as events:
        for step, value in windows(*GROWS):
            events.window(step, {"loss": 1.0, exchange.ERROR: 0.2, exchange.RESIDUAL: value})
    closing = {"recipe": "llama", exchange.ERROR: 0.2, exchange.RESIDUAL: GROWS[-1]}
    (tmp_path / "summary.json").write_text(json.dumps(closing))
    html = report.render(report.read_run(tmp_path))
    for shown in ("Warning: The residual of the exchange has grown", "Error of the exchange", "Residual of the"):
        assert shown in html
    assert dict(summary.speed(closing)) == {"error of the exchange": "0.2", "residual of the exchange": "1.1"}


def test_a_warning_is_a_line_and_an_event():
    lines, events, terminal = io.StringIO(), io.StringIO(), io.StringIO()
    progress.TextLines(lines).warning(110, "it grows")
    progress.JsonLines(events).warning(110, "it grows")
    progress.Bar(rich.console.Console(file=terminal)).warning(110, "it grows")
    assert lines.getvalue() == terminal.getvalue() == "Warning: it grows\n"
    assert json.loads(events.getvalue()) == {"event": "warning", "step": 110, "text": "it grows"}
