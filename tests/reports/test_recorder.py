import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from reports.synthetic import make_batch, make_config, make_evaluation, make_report, write_run

from steadyrl.errors import ConfigError, SteadyRLError
from steadyrl.recipe import load_config
from steadyrl.reports.recorder import RunFolder, read_rollouts, read_run, recorded_batches
from steadyrl.reports.summary import lag_counts, summary
from steadyrl.types import Consumed, Rollout, StepReport


def test_a_run_reads_back_as_it_was_written(tmp_path):
    write_run(tmp_path / "run", steps=10)
    run = read_run(tmp_path / "run")
    assert run.name == "run"
    assert [row["step"] for row in run.steps] == list(range(1, 11))
    assert run.steps[3]["metrics"] == make_report(4, steps=10).metrics
    assert run.evaluations == [make_evaluation(0, 0.12), make_evaluation(10, 0.12 + 0.5)]
    assert run.status == {"state": "finished"}
    assert run.config["objective"]["boundary"]["rule"] == "sat"


@pytest.mark.parametrize("preset", [None, "sat-gspo"])
def test_config_toml_is_a_recipe_of_the_same_run(tmp_path, preset):
    config = make_config(preset or "grpo")
    if preset is None:  # TOML has no null: the key must be left out
        config = config.model_copy(update={"objective": config.objective.model_copy(update={"preset": None})})
    RunFolder.create(tmp_path / "run", config)
    assert load_config(tmp_path / "run" / "config.toml") == config


def test_numbers_that_are_not_finite_become_null_and_arrays_become_lists(tmp_path):
    folder = RunFolder.create(tmp_path, make_config())
    metrics = {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": torch.tensor(2.0), "e": np.float64("nan")}
    folder.step(StepReport(1, 0, metrics, {"step": 1.0}, {"lag": np.array([1.0, math.inf])}))
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["metrics"] == {"a": None, "b": None, "c": 0.5, "d": 2.0, "e": None}
    assert row["histograms"] == {"lag": [1.0, None]}


def test_rows_are_on_disk_at_once(tmp_path):
    folder = RunFolder.create(tmp_path, make_config())
    folder.step(make_report(1))
    assert len(read_run(tmp_path).steps) == 1
    folder.status("failed", error="no memory")
    assert read_run(tmp_path).status == {"state": "failed", "error": "no memory"}


def test_rollouts_read_back(tmp_path):
    folder = RunFolder.create(tmp_path, make_config())
    batch = make_batch(12)
    n = len(batch.rollouts[0].token_ids)
    batch.rollouts[0].consumed = Consumed(7, -0.1, np.linspace(-3, 0, n, dtype=np.float32), None)
    folder.rollouts(batch, lambda token: f"<{token}>")
    (file,) = recorded_batches(read_run(tmp_path))
    assert file.name == "batch_000012.jsonl"
    rows = read_rollouts(file)
    assert rows[1]["reward"] is None
    for row, rollout in zip(rows, batch.rollouts, strict=True):
        assert repr(Rollout.from_json(row).to_json()) == repr(rollout.to_json())
    assert rows[0]["token_texts"] == [f"<{token}>" for token in batch.rollouts[0].token_ids]
    assert (rows[0]["train_version"], rows[1]["train_version"]) == (7, None)


def test_a_folder_that_holds_a_run_is_refused_with_the_remedy(tmp_path):
    write_run(tmp_path, steps=3)
    with pytest.raises(ConfigError, match=r"another run_dir.*--resume"):
        RunFolder.create(tmp_path, make_config())
    assert len(read_run(tmp_path).steps) == 3


def test_a_run_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.create(tmp_path / "run", make_config())


def test_resume_drops_what_lies_beyond_the_checkpoint(tmp_path):
    write_run(tmp_path, steps=30)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "met')
    folder = RunFolder.open(tmp_path)
    folder.rewind(make_config(), step=17, evaluated=10)
    kept_until = max(event["end_s"] for event in read_run(tmp_path).timeline)
    folder.step(make_report(18))
    folder.evaluation(make_evaluation(20, 0.5))
    folder.event("trainer", "train", 0.5, 1.5, 18)
    run = read_run(tmp_path)
    assert [row["step"] for row in run.steps] == list(range(1, 19))
    assert [row["step"] for row in run.evaluations] == [0, 10, 20]
    assert max(event["step"] for event in run.timeline[:-1]) == 17
    assert run.timeline[-1]["start_s"] == pytest.approx(kept_until + 0.5)


def test_a_torn_last_line_is_skipped_and_a_damaged_one_inside_is_named(tmp_path):
    write_run(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 6, "batch_id": 5, "metr')
    assert len(read_run(tmp_path).steps) == 5
    path.write_text('{"step": \n' + whole)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1 "):
        read_run(tmp_path)


WRONG_ROWS = {
    "metrics.jsonl": [
        "5",
        "{}",
        "[]",
        "null",
        '{"step": "1", "metrics": {}, "seconds": {}}',
        '{"step": 1, "metrics": [], "seconds": {}}',
        '{"step": 1, "metrics": {"a": "b"}, "seconds": {}}',
        '{"step": 1, "metrics": {"a": 1e999}, "seconds": {}}',
        '{"step": 1, "metrics": {"a": 1' + "0" * 400 + '}, "seconds": {}}',
        '{"step": 1, "metrics": {}, "seconds": {}, "histograms": {"lag": 3}}',
        "[" * 100_000,
    ],
    "evaluations.jsonl": ["{}", '{"step": 1, "avg_at_k": "high"}', '{"step": 1, "avg_at_k_se": []}'],
    "timeline.jsonl": [
        '{"step": 1}',
        '{"step": 1, "actor": "trainer", "phase": [], "start_s": 0, "end_s": 1}',
        '{"step": 1, "actor": "trainer", "phase": "train", "start_s": null, "end_s": 1}',
    ],
}


@pytest.mark.parametrize(
    ("name", "line"),
    [(name, line) for name, lines in WRONG_ROWS.items() for line in lines],
    ids=lambda value: value[:50],
)
def test_a_row_that_is_json_but_wrong_is_named(tmp_path, name, line):
    write_run(tmp_path, steps=2)
    with (tmp_path / name).open("a") as file:
        count = len((tmp_path / name).read_text().splitlines())
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=rf"{name}, line {count + 1} "):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name}, line {count + 1} "):
        RunFolder.open(tmp_path).rewind(make_config(), step=1, evaluated=0)


@pytest.mark.parametrize("change", [{"group": []}, {"text": 5}, {"reward": "1"}, {"loss_mask": 1}, {"status": None}])
def test_a_wrong_rollout_is_named(tmp_path, change):
    folder = RunFolder.create(tmp_path, make_config())
    folder.rollouts(make_batch(0), str)
    (file,) = recorded_batches(read_run(tmp_path))
    first, *_ = read_rollouts(file)
    file.write_text(json.dumps({**first, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"batch_000000\.jsonl, line 1 "):
        read_rollouts(file)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", "status.json", "config.toml"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, name):
    write_run(tmp_path, steps=2)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=name):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("status.json", "[]"),
        ("status.json", "["),
        ("status.json", "[" * 100_000),
        ("config.toml", "objective = 5"),
        ("config.toml", "trainer = 5"),
        ("config.toml", "a = ="),
        ("config.toml", "[objective]\nboundary = 5"),
        ("config.toml", "[objective]\npreset = 5"),
    ],
)
def test_a_wrong_status_or_recipe_is_named(tmp_path, name, text):
    write_run(tmp_path, steps=2)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_run(tmp_path)


def test_a_folder_has_one_writer(tmp_path):
    folder = RunFolder.create(tmp_path, make_config())
    with pytest.raises(ConfigError, match="another process"):
        RunFolder.open(tmp_path)
    code = f"from steadyrl.reports.recorder import RunFolder; RunFolder.open({str(tmp_path)!r})"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process" in second.stderr
    assert read_run(tmp_path).steps == []  # reading is free
    folder.close()
    RunFolder.open(tmp_path)


def test_a_full_disk_ends_a_run_with_a_sentence(tmp_path):
    folder = RunFolder.create(tmp_path, make_config())
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(SteadyRLError, match=r"metrics\.jsonl.*--resume"):
        folder.step(make_report(1))


def test_a_folder_that_is_no_run_says_what_is_missing(tmp_path):
    for name in ("nowhere", "n" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="no run folder at"):
            read_run(tmp_path / name)
        with pytest.raises(ConfigError, match="start without --resume"):
            RunFolder.open(tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no config\.toml$"):
        read_run(tmp_path)
    RunFolder.create(tmp_path / "first", make_config())
    with pytest.raises(ConfigError, match="contains the runs first"):
        read_run(tmp_path)


def test_summary_of_a_small_run_worked_out_by_hand(tmp_path):
    folder = RunFolder.create(tmp_path / "run", make_config())
    folder.evaluation(make_evaluation(0, 0.1))
    for step, tokens, d_bar, lag in ((1, 100, 0.01, 0), (2, 300, 0.03, 2), (3, 100, math.nan, 1)):
        metrics = {"sampled_tokens": tokens, "mismatch/d_bar": d_bar, "staleness/lag_max": lag}
        folder.step(StepReport(step, step - 1, metrics, {}, {"lag": [0.0] * lag + [float(tokens)]}))
    folder.event("trainer", "wait", 1.0, 3.0, 1)
    folder.event("trainer", "train", 3.0, 8.0, 1)
    folder.event("trainer", "broadcast", 8.0, 9.0, 1)
    folder.event("engine", "generate", 1.0, 5.0, 1)
    folder.event("engine", "evaluate", 9.0, 11.0, 1)
    folder.evaluation(make_evaluation(3, 0.6))
    folder.status("stopped")
    run = read_run(tmp_path / "run")
    assert summary(run) == {
        "name": "run",
        "method": "sat-grpo",
        "state": "stopped",
        "steps": 3,
        "evaluation_k": 8,
        "evaluation_before": 0.1,
        "evaluation_before_se": 0.03,
        "evaluation_after": 0.6,
        "evaluation_after_se": 0.03,
        "largest_lag": 2,
        "d_bar": pytest.approx((100 * 0.01 + 300 * 0.03) / 400),
        "gate_rate": None,
        "intervention_rate": None,
        "trainer_utilisation": pytest.approx(0.6),
        "engine_utilisation": pytest.approx(0.6),
        "wall_s": pytest.approx(10.0),
    }
    assert lag_counts(run) == [100.0, 100.0, 300.0]


def test_summary_of_an_empty_run_is_all_unknown(tmp_path):
    RunFolder.create(tmp_path, make_config())
    numbers = summary(read_run(tmp_path))
    assert numbers.pop("steps") == 0
    assert {name for name, value in numbers.items() if value is not None} == {"name", "method"}
