import io
import math
import os

import pytest
from reports.synthetic import make_config, make_evaluation, make_report
from rich.console import Console

from steadyrl.reports import progress as module
from steadyrl.reports.progress import TrainingProgress, sparkline
from steadyrl.types import StepReport


def make_console(is_terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=width, color_system=None)


def train(progress, steps=40, resumed_from=0) -> int:
    """Shows a whole run; the last step it got to."""
    step = resumed_from
    with progress:
        progress.start(make_config(steps=steps), resumed_from)
        progress.evaluation(make_evaluation(0, 0.12))
        for step in range(resumed_from + 1, steps + 1):
            progress.step(make_report(step, steps))
        progress.evaluation(make_evaluation(steps, 0.62))
    return step


def test_a_log_file_gets_a_line_every_tenth_of_the_run():
    console = make_console(False)
    train(TrainingProgress(console))
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("training sat-grpo for 40 optimizer steps")
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [
        f"step {step}/40" for step in range(4, 41, 4)
    ]
    assert lines[-1] == "evaluation after step 40: 0.620 +- 0.030"
    assert "trainer waits 30%" in lines[-2]


def test_a_slow_run_gets_a_line_every_ten_seconds(monkeypatch):
    clock = iter(range(0, 100_000, 6))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    console = make_console(False)
    with TrainingProgress(console) as progress:
        progress.start(make_config(steps=1000))
        for step in range(1, 7):
            progress.step(make_report(step, 1000))
    assert console.file.getvalue().count("step ") >= 3


def test_a_terminal_shows_what_a_practitioner_watches():
    console = make_console(True)
    train(TrainingProgress(console))
    text = console.file.getvalue()
    for name in ("reward", "d-bar", "lag max", "gate rate", "intervention", "grad norm", "tokens/s", "engine idle"):
        assert name in text
    assert "40/40 steps" in text
    assert "0.120 +- 0.030 -> 0.620 +- 0.030" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_missing_metric_stops_nothing(is_terminal):
    console = make_console(is_terminal, width=40)
    with TrainingProgress(console) as progress:
        progress.message("before [start]")
        progress.start(make_config(steps=2))
        progress.step(StepReport(1, 0, {}, {}))
        progress.step(StepReport(2, 1, {"reward/mean": math.nan, "mismatch/d_bar": math.inf}, {"step": 0.0}))
        progress.evaluation({})
    assert "before [start]" in console.file.getvalue()


def test_time_left_of_a_resumed_run_counts_its_own_steps_only(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = make_console(False)
    with TrainingProgress(console) as progress:
        progress.start(make_config(steps=100), resumed_from=50)
        now[0] = 60.0
        progress.step(make_report(60, 100))
    assert "resumed after step 50" in console.file.getvalue()
    assert "4:00 left" in console.file.getvalue()


def test_sparkline():
    assert sparkline([0.0, 1.0, math.nan, 0.5]) == "\u2581\u2588 \u2584"
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert sparkline([math.nan]) == "-"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_of_ascii_still_gets_its_lines(is_terminal):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with TrainingProgress(Console(file=file, force_terminal=is_terminal, width=100)) as progress:
        progress.start(make_config(steps=2))
        progress.message("na\u00efve \u2581")
        progress.step(make_report(1))
        progress.step(make_report(2))
    assert b"na?ve" in raw.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_reader_that_went_away_does_not_end_the_run(is_terminal):
    reader, writer = os.pipe()
    file = os.fdopen(writer, "w")
    os.close(reader)
    assert train(TrainingProgress(Console(file=file, force_terminal=is_terminal, width=100))) == 40
    file.close()  # nothing that could not be written is left to fail


def test_a_full_disk_or_a_closed_file_do_not_end_the_run():
    with open("/dev/full", "w") as file:
        assert train(TrainingProgress(Console(file=file, force_terminal=False, width=100))) == 40
    assert train(TrainingProgress(Console(file=file, force_terminal=False, width=100))) == 40
