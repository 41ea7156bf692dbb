"""Trackers: with the real packages where they are installed, and with doubles that keep the published call shapes."""

import json
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from reports.synthetic import make_config, make_evaluation, make_report, write_run

from steadyrl.errors import ConfigError
from steadyrl.recipe import build_config
from steadyrl.reports import trackers
from steadyrl.reports.recorder import RunFolder
from steadyrl.reports.trackers import Tracking, check_installed
from steadyrl.types import StepReport


def tracked(*names, **table):
    return build_config({"tracking": {"trackers": list(names), **table}})


class Memory:
    """A tracker that remembers, and fails when it is told to."""

    def __init__(self):
        self.rows, self.ends, self.fails = [], [], False

    def log(self, values, step):
        if self.fails:
            raise TimeoutError("no answer")
        self.rows.append((step, values))

    def close(self, failed):
        self.ends.append(failed)

    def steps(self, name):
        return [step for step, values in self.rows if name in values]


@pytest.fixture
def services(monkeypatch):
    """TensorBoard and wandb replaced by memories that outlive the run, as services do."""
    memories = {"tensorboard": Memory(), "wandb": Memory()}
    for name, memory in memories.items():
        monkeypatch.setitem(trackers.OPENERS, name, lambda *_, memory=memory: memory)
    return SimpleNamespace(**memories)


def test_without_trackers_nothing_is_opened_or_written(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    before = sorted(os.listdir(folder.path))
    with Tracking(make_config(), folder.path, pytest.fail) as tracking:
        tracking.step(make_report(1))
        tracking.evaluation(make_evaluation(1, 0.5))
    assert sorted(os.listdir(folder.path)) == before


def test_rows_arrive_at_their_own_steps_also_late_ones(tmp_path, services):
    RunFolder.create(tmp_path, make_config()).close()
    with Tracking(tracked("wandb"), tmp_path, pytest.fail) as tracking:
        tracking.evaluation(make_evaluation(0, 0.1))
        for step in (1, 2, 3):
            tracking.step(make_report(step))
        tracking.evaluation(make_evaluation(2, 0.4))  # generated while step 3 was trained
        tracking.evaluation(make_evaluation(1, 0.3))
    assert services.wandb.steps("reward/mean") == [1, 2, 3]
    assert services.wandb.steps("evaluation/avg_at_k") == [0, 2, 1]
    assert services.wandb.rows[4] == (
        2,
        {
            "evaluation/avg_at_k": 0.4,
            "evaluation/avg_at_k_se": 0.03,
            "evaluation/pass_at_k": pytest.approx(0.6),
            "evaluation/pass_at_k_se": 0.03,
            "evaluation/truncated": 0.01,
        },
    )
    report = make_report(2)
    assert services.wandb.rows[2] == (2, report.metrics | {f"seconds/{k}": v for k, v in report.seconds.items()})
    assert services.wandb.ends == [False]


def test_numbers_that_are_not_finite_are_left_out(tmp_path, services):
    RunFolder.create(tmp_path, make_config()).close()
    with Tracking(tracked("wandb"), tmp_path, pytest.fail) as tracking:
        tracking.step(StepReport(1, 0, {"a": math.nan, "b": math.inf, "c": 2.0}, {"step": 1.0}, {}))
    assert services.wandb.rows == [(1, {"c": 2.0, "seconds/step": 1.0})]


def test_a_resumed_run_repeats_no_row_and_leaves_none_out(tmp_path, services):
    config = tracked("wandb")
    with RunFolder.create(tmp_path, config) as folder, Tracking(config, tmp_path, pytest.fail) as tracking:
        for step in range(1, 6):
            folder.step(make_report(step))
            tracking.step(make_report(step))
        folder.evaluation(make_evaluation(4, 0.4))
        tracking.evaluation(make_evaluation(4, 0.4))
    for _ in range(2):  # twice back to the checkpoint of step 3, the second time before step 5 came again
        with RunFolder.open(tmp_path) as folder:
            folder.rewind(config, step=3, evaluated=0)
            with Tracking(config, tmp_path, pytest.fail) as tracking:
                for step in (4, 5) if _ else (4,):
                    folder.step(make_report(step))
                    tracking.step(make_report(step))
                tracking.evaluation(make_evaluation(4, 0.4))
                tracking.step(make_report(6 + _))
    assert services.wandb.steps("reward/mean") == [1, 2, 3, 4, 5, 6, 7]
    assert services.wandb.steps("evaluation/avg_at_k") == [4]
    assert services.wandb.ends == [False] * 3


def test_a_tracker_added_later_gets_the_rows_it_missed(tmp_path, services):
    write_run(tmp_path, steps=10).close()
    with Tracking(tracked("wandb"), tmp_path, pytest.fail):
        pass
    with Tracking(tracked("wandb", "tensorboard"), tmp_path, pytest.fail) as tracking:
        tracking.step(make_report(11))
    for memory in (services.wandb, services.tensorboard):
        assert memory.steps("reward/mean") == list(range(1, 12))
        assert memory.steps("evaluation/avg_at_k") == [0, 10]


def test_a_tracker_that_fails_is_given_up_with_one_message_and_the_other_goes_on(tmp_path, services):
    said = []
    RunFolder.create(tmp_path, make_config()).close()
    with Tracking(tracked("wandb", "tensorboard"), tmp_path, said.append) as tracking:
        tracking.step(make_report(1))
        services.wandb.fails = True
        tracking.step(make_report(2))
        tracking.step(make_report(3))
    assert services.wandb.steps("reward/mean") == [1]
    assert services.tensorboard.steps("reward/mean") == [1, 2, 3]
    assert len(said) == 1
    assert said[0].startswith("wandb gets no more rows")
    assert "no answer" in said[0]
    services.wandb.fails = False
    with Tracking(tracked("wandb"), tmp_path, pytest.fail) as tracking:  # the row that failed is no row it has
        tracking.step(make_report(2))
    assert services.wandb.steps("reward/mean") == [1, 2]


def test_a_tracker_that_cannot_open_or_close_does_not_stop_the_run(tmp_path, services, monkeypatch):
    def refuse(*_):
        raise RuntimeError("not logged in")

    said = []
    RunFolder.create(tmp_path, make_config()).close()
    monkeypatch.setitem(trackers.OPENERS, "wandb", refuse)
    monkeypatch.setattr(services.tensorboard, "close", refuse)
    with Tracking(tracked("wandb", "tensorboard"), tmp_path, said.append) as tracking:
        tracking.step(make_report(1))
    assert services.tensorboard.steps("reward/mean") == [1]
    assert [text.split()[0] for text in said] == ["wandb", "tensorboard"]


def test_a_tracker_that_hangs_at_the_end_does_not_keep_the_run(tmp_path, services, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.1)
    released = threading.Event()
    services.tensorboard.close = lambda failed: released.wait(60)
    folder, messages = RunFolder.create(tmp_path / "run", make_config()), []
    start = time.monotonic()
    with Tracking(tracked("tensorboard", "wandb"), folder.path, messages.append) as tracking:
        tracking.step(make_report(1))
    assert time.monotonic() - start < 30
    released.set()
    assert messages == ["tensorboard did not close within 0 s; the run folder has every row"]
    assert services.wandb.ends == [False]


def test_a_run_that_fails_is_closed_as_failed_and_its_error_is_kept(tmp_path, services):
    RunFolder.create(tmp_path, make_config()).close()
    with pytest.raises(ZeroDivisionError), Tracking(tracked("wandb"), tmp_path, pytest.fail):
        raise ZeroDivisionError
    assert services.wandb.ends == [True]


def test_a_torn_note_costs_one_row_twice_at_most(tmp_path, services):
    write_run(tmp_path, steps=3).close()
    with Tracking(tracked("wandb"), tmp_path, pytest.fail):
        pass
    notes = tmp_path / "tracking.jsonl"
    first_id = json.loads(notes.read_text().splitlines()[0])["run_id"]
    notes.write_text("[]\n" + notes.read_text()[:-20])
    for _ in range(2):
        with Tracking(tracked("wandb"), tmp_path, pytest.fail):
            pass
    rows = [json.loads(line) for line in notes.read_text().splitlines() if line.endswith(("}", "]"))]
    assert [row["run_id"] for row in rows if "run_id" in row] == [first_id]
    assert services.wandb.steps("reward/mean") == [1, 2, 3]
    assert services.wandb.steps("evaluation/avg_at_k") == [0, 0]


def test_a_missing_package_and_an_unknown_tracker_are_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb").mkdir()  # where earlier runs left their files; no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'wandb', which is not installed: pip install wandb"):
        check_installed(tracked("wandb").tracking)
    with pytest.raises(ConfigError, match=r"tracking\.trackers"):
        tracked("mlflow")


SMALL = {
    "trainer": {"steps": 2},
    "pipeline": {"backend": "inline", "prompts_per_batch": 1, "responses_per_prompt": 2},
    "sampling": {"max_response_tokens": 2},
    "evaluation": {"prompts": 2, "samples_per_prompt": 1, "max_response_tokens": 2, "every_steps": 0},
    "checkpoint": {"every_steps": 1},
}


def test_training_feeds_a_real_tensorboard_also_after_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from steadyrl.run import train

    config = build_config(
        {**SMALL, "run_dir": str(tmp_path / "run"), "tracking": {"trackers": ["tensorboard"]}},
    )
    train(config)
    longer = build_config({**config.model_dump(), "trainer": {**config.trainer.model_dump(), "steps": 3}})
    train(longer, resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    rewards = events.Scalars("reward/mean")
    assert [(event.step, event.value) for event in rewards] == [
        (row["step"], pytest.approx(row["metrics"]["reward/mean"])) for row in rows
    ]
    scores = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/avg_at_k")] == [
        (row["step"], pytest.approx(row["avg_at_k"])) for row in scores
    ]
    assert [row["step"] for row in scores] == [0, 2, 3]


def test_the_calls_to_wandb_with_a_double(tmp_path, monkeypatch):
    """A double of the package: a run whose own counter moves on with every call, as wandb's does."""
    calls, opened = [], []

    class Run:
        def define_metric(self, name, step_metric):
            calls.append(("axis", name, step_metric))

        def log(self, data):
            calls.append(("row", data["optimizer_step"], len(data)))

        def finish(self, exit_code):
            calls.append(("end", exit_code))

    def init(**given):
        opened.append(given)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    RunFolder.create(tmp_path / "mine", make_config()).close()
    for _ in range(2):
        with Tracking(tracked("wandb", project="sums"), tmp_path / "mine", pytest.fail) as tracking:
            tracking.evaluation(make_evaluation(5, 0.5))
    assert calls == [
        ("axis", "*", "optimizer_step"),
        ("row", 5, 6),
        ("end", 0),
        ("axis", "*", "optimizer_step"),
        ("end", 0),
    ]
    first, second = opened
    assert (first["project"], first["name"], first["resume"]) == ("sums", "mine", "allow")
    noted = json.loads((tmp_path / "mine" / "tracking.jsonl").read_text().splitlines()[0])["run_id"]
    assert first["id"] == second["id"] == noted
    assert first["config"]["tracking"]["project"] == "sums"
    assert first["dir"] == str(tmp_path / "mine")


def test_the_calls_to_trackio_with_a_double(tmp_path, monkeypatch):
    """A double of the package: a run is found again by its name."""
    opened, rows = [], []

    class Run:
        def log(self, metrics, step):
            rows.append((step, sorted(metrics)[0]))

        def finish(self):
            rows.append("end")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **given: opened.append(given) or Run()))
    RunFolder.create(tmp_path / "mine", make_config()).close()
    for _ in range(2):
        with Tracking(tracked("trackio", name="best"), tmp_path / "mine", pytest.fail) as tracking:
            tracking.evaluation(make_evaluation(5, 0.5))
    assert rows == [(5, "evaluation/avg_at_k"), "end", "end"]
    assert opened[0]["name"] == opened[1]["name"]
    assert opened[0]["name"].startswith("best-")
    assert (opened[0]["project"], opened[0]["resume"]) == ("steadyrl", "allow")


WRITE = """
import sys
from pathlib import Path
from reports.synthetic import make_config, make_evaluation, make_report
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import RunFolder
from steadyrl.reports.trackers import Tracking

name, path, resumed = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
config = build_config({"tracking": {"trackers": [name], "project": "sums"}})
folder = RunFolder.open(path) if resumed else RunFolder.create(path, config)
if resumed:
    folder.rewind(config, step=2, evaluated=0)
with Tracking(config, path, sys.exit) as tracking:
    for step in (3, 4, 5, 6) if resumed else (1, 2, 3, 4):
        folder.step(make_report(step))
        tracking.step(make_report(step))
    tracking.evaluation(make_evaluation(2, 0.4))
"""


def write_twice(name, tmp_path):
    """Rows 1 to 4, then a resume from step 2 to step 6, each in a process of its own, with no network in reach."""
    pytest.importorskip(name)
    places = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for more in ([], ["resumed"]):
        subprocess.run(
            [sys.executable, "-c", WRITE, name, str(tmp_path / "run"), *more],
            env={**os.environ, **places, **paths},
            check=True,
            timeout=120,
        )


def expected_rows():
    return [(step, pytest.approx(make_report(step).metrics["reward/mean"])) for step in range(1, 7)]


def wandb_records(content):
    """The records of a .wandb file: after 7 bytes the log format of LevelDB, blocks of 32 KiB with pieces in them."""
    whole, at = b"", 7
    while at < len(content):
        room = 32768 - at % 32768
        if room < 7:  # no piece starts there
            at += room
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_a_real_wandb_holds_every_row_once_at_its_step(tmp_path):
    write_twice("wandb", tmp_path)
    from wandb.proto import wandb_internal_pb2

    rows, ids = [], set()
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            if record.history.item:
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    rewards = [(row["optimizer_step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert rewards == expected_rows()
    assert [row["optimizer_step"] for row in rows if "evaluation/avg_at_k" in row] == [2]
    assert len(ids) == 1


@pytest.mark.slow
def test_a_real_trackio_holds_every_row_once_at_its_step(tmp_path):
    write_twice("trackio", tmp_path)
    read = """
        import json, trackio.sqlite_storage as storage
        (run,) = storage.SQLiteStorage.get_run_records("sums")
        print(json.dumps(storage.SQLiteStorage.get_logs("sums", run["name"], run_id=run["id"])))
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(read)],
        env={
            **os.environ,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    rows = json.loads(shown.stdout.splitlines()[-1])
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert sorted(rewards) == expected_rows()
    assert [row["step"] for row in rows if "evaluation/avg_at_k" in row] == [2]
