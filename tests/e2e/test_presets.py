"""Every named objective trains, through the whole system."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from steadyrl.method import ObjectiveConfig
from steadyrl.presets import PRESETS
from steadyrl.recipe import load_config
from steadyrl.run import train

SMOKE = Path(__file__).parent.parent.parent / "recipes" / "smoke.toml"
SMALL = ["evaluation.prompts=2", "evaluation.samples_per_prompt=1"]


def steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", PRESETS)
def test_two_steps_of_every_preset(tmp_path, name):
    result = train(load_config(SMOKE, [f"objective={name}", f"run_dir={tmp_path / 'run'}", *SMALL]))
    rows = steps(result.folder)
    assert result.finished
    assert len(rows) == 2
    for row in rows:
        assert math.isfinite(row["metrics"]["objective/surrogate"])
        assert row["metrics"]["optim/grad_norm"] > 0
    objective = ObjectiveConfig.model_validate(name)
    assert ("sat/gate_rate" in rows[1]["metrics"]) == (objective.boundary.rule == "sat")
    assert ("correction/weight" in rows[1]["metrics"]) == (objective.correction is not None)


def test_there_are_at_least_thirty():
    assert len(PRESETS) >= 30


def test_the_anchor_at_the_start_of_a_batch(tmp_path):
    """With several steps per batch the first has ratio 1 and the later ones have not; resume keeps the anchor."""
    options = ["objective=sat-grpo", "objective.anchor=step_start", "pipeline.steps_per_batch=2", *SMALL]
    whole = train(load_config(SMOKE, [*options, f"run_dir={tmp_path / 'whole'}", "trainer.steps=4"]))
    quantiles = [row["metrics"]["sat/q"] for row in steps(whole.folder)]
    assert quantiles[0] == quantiles[2] == 0
    assert quantiles[1] > 0
    assert quantiles[3] > 0


def test_the_split_of_the_log_ratio_is_reported_when_the_sampling_weights_are_scored(tmp_path):
    options = ["objective=sat-grpo", "objective.anchor=old_actor", "trainer.steps=3", "trainer.lr=1e-3", *SMALL]
    rows = steps(train(load_config(SMOKE, [*options, f"run_dir={tmp_path / 'run'}"])).folder)
    first, last = rows[0]["metrics"], rows[2]["metrics"]
    assert first["split/policy_d_bar"] == 0  # lag 0: the policy has not moved
    assert first["split/engine_d_bar"] == pytest.approx(first["mismatch/d_bar"])
    assert last["split/policy_d_bar"] > last["split/engine_d_bar"] > 0
    assert last["split/policy"] + last["split/engine"] == pytest.approx(last["mismatch/delta"], abs=1e-6)


def test_what_is_broken_down_adds_up(tmp_path):
    rows = steps(train(load_config(SMOKE, [f"run_dir={tmp_path / 'run'}", *SMALL])).folder)
    histograms = rows[1]["histograms"]
    assert len(histograms["routing/disagreement_by_layer"]) == 3
    by_age = histograms["d_bar_by_age"]
    assert by_age[0] is None  # nothing of lag 0 in the second step
    assert by_age[1] == pytest.approx(rows[1]["metrics"]["mismatch/d_bar"])
    assert len(histograms["d_bar_by_position"]) == 6
    assert len(histograms["removed_by_probability"]) == 6
