"""Each fault is put in and recognised; healthy data give no alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest
from inspection import dumps

from steadyrl.errors import ConfigError
from steadyrl.inspection.study import inspect

BIG = {"steps": 2, "responses": 40, "longest": 120}


def checks_of(tmp_path, rows, name="dump.jsonl"):
    return {check.name: check for check in inspect([dumps.write_jsonl(tmp_path / name, rows)], ["grpo"]).checks}


def bad(checks):
    return {name for name, check in checks.items() if check.state == "bad"}


@pytest.mark.parametrize("drift", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", [1, 2])
def test_healthy_data_give_no_alarm(tmp_path, drift, seed):
    checks = checks_of(tmp_path, dumps.own_rows(dumps.make_run(seed=seed, drift=drift, **BIG)))
    assert {check.state for check in checks.values()} == {"good"}


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.25])
def test_raw_log_probabilities_at_a_sampling_temperature(tmp_path, temperature):
    """The engine samples at T and reports raw; the trainer divides by T. Then E[ratio] is above 1, too."""
    run = dumps.make_run(sampled_at=temperature, trainer_temperature=temperature, **BIG)
    checks = checks_of(tmp_path, dumps.own_rows(run))
    assert "temperature" in bad(checks)
    sharper = "trainer" if temperature < 1 else "engine"
    assert f"the {sharper}'s distribution is the sharper one" in checks["temperature"].sentence
    assert "did not report what it sampled from" in checks["temperature"].sentence
    assert checks["sampling support"].state == "good"
    assert "explains it" in checks["mean ratio"].sentence


def test_a_temperature_that_the_trainer_forgot(tmp_path):
    """Engine at T, sampling and report alike, trainer at 1: E[ratio] is 1, and only the slope tells."""
    run = dumps.make_run(sampled_at=0.7, engine_temperature=0.7, **BIG)
    checks = checks_of(tmp_path, dumps.own_rows(run))
    assert "the engine's distribution is the sharper one" in checks["temperature"].sentence
    assert "did not report" not in checks["temperature"].sentence


@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_top_p_that_only_the_engine_applies(tmp_path, top_p):
    checks = checks_of(tmp_path, dumps.own_rows(dumps.make_run(top_p=top_p, **BIG)))
    assert "sampling support" in bad(checks)
    assert "temperature" not in bad(checks)


def test_ratio_away_from_1_for_no_known_reason(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    rng = np.random.default_rng(0)
    for row in rows:  # the trainer scores everything at random 2 % higher or not
        n = len(row["token_ids"])
        row["trainer_logp"] = (np.asarray(row["trainer_logp"]) + 0.02 + 0.01 * rng.normal(size=n)).tolist()
    checks = checks_of(tmp_path, rows)
    assert "mean ratio" in bad(checks)
    assert "not of what it sampled from" in checks["mean ratio"].sentence


def test_a_low_ratio_with_drift_on_both_sides_is_no_top_p(tmp_path):
    rows = dumps.own_rows(dumps.make_run(steps=2, responses=160, longest=120))
    rng = np.random.default_rng(0)
    for row in rows:  # E[e^d] = 0.99, and 59 % of the drift below 0
        d = rng.normal(-0.0211, 0.15, len(row["token_ids"]))
        row["behavior_logp"] = np.where(row["loss_mask"], -1.0 - rng.random(len(d)), 0.0).tolist()
        row["trainer_logp"] = (np.asarray(row["behavior_logp"]) + d).tolist()
    checks = checks_of(tmp_path, rows)
    assert checks["sampling support"].state == "good"
    assert "mean ratio" in bad(checks)


def test_ratios_that_are_all_exactly_1(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    for row in rows:
        row["behavior_logp"] = row["trainer_logp"]
    checks = checks_of(tmp_path, rows)
    assert bad(checks) == {"independence"}
    assert checks["temperature"].state == "unknown"


@pytest.mark.parametrize(("shift", "word"), [(1, "previous"), (-1, "next")])
def test_trainer_list_shifted_by_one(tmp_path, shift, word):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    for row in rows:
        sampled = row["trainer_logp"][dumps.PROMPT :]
        row["trainer_logp"] = [0.0] * dumps.PROMPT + np.roll(sampled, shift).tolist()
    checks = checks_of(tmp_path, rows)
    # trainer[t] is the engine's t - 1 where the list was moved to the right
    assert f"the engine's {word} token" in checks["alignment"].sentence
    assert checks["mean ratio"].state == "unknown"


@pytest.mark.parametrize(("shift", "word"), [(1, "late"), (-1, "early")])
def test_mask_shifted_by_one(tmp_path, shift, word):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    for row in rows:
        mask = row["loss_mask"]
        row["loss_mask"] = [*mask[1:], 0] if shift < 0 else [0, *mask[:-1]]
    assert f"one token too {word}" in checks_of(tmp_path, rows)["loss mask"].sentence


def test_log_probabilities_above_0(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    rows[3]["behavior_logp"][10] = 0.2
    assert "1 of the engine" in checks_of(tmp_path, rows)["log-probabilities above 0"].sentence
    for row in rows:
        row["behavior_logp"] = np.exp(row["behavior_logp"]).tolist()
    sentence = checks_of(tmp_path, rows)["log-probabilities above 0"].sentence
    assert "these are probabilities" in sentence


@pytest.mark.parametrize("value", [float("nan"), None, float("-inf"), -9999.0])
def test_numbers_that_are_none(tmp_path, value):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    rows[5]["behavior_logp"][12] = value
    found = inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"])
    checks = {check.name: check for check in found.checks}
    assert bad(checks) == {"numbers"}
    assert "1 of the engine" in checks["numbers"].sentence
    assert sum(row.responses for row in found.steps) == len(rows) - 1  # it is left out and named, not mended


def test_copies(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    checks = checks_of(tmp_path, rows + rows[:7])
    assert bad(checks) == {"duplicates"}
    assert checks["duplicates"].sentence.startswith("7 of 87")


def test_a_short_likely_answer_may_come_twice(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    sure = {**rows[0], "token_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "behavior_logp": [0.0, 0.0, -0.1]}
    sure |= {"trainer_logp": [0.0, 0.0, -0.11], "old_logp": None, "versions": [-1, -1, 0]}
    assert checks_of(tmp_path, [*rows, sure, sure])["duplicates"].state == "good"


def test_versions(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    rows[0]["versions"][-1] = 9  # the learner has 0
    rows[1]["versions"][-1] = -1
    rows[60]["versions"][-5:] = [0, 1, 1, 0, 0]
    found = inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"])
    sentence = next(check.sentence for check in found.checks if check.name == "versions")
    assert sum(found.breakdowns["age"]["d_bar"][1].tolist()) == found.evidence.active - 2  # neither is given an age
    assert "1 tokens were sampled by a version that the learner had not reached" in sentence
    assert "1 trained tokens have no version" in sentence
    assert "in 1 responses a later token has an older version" in sentence


def test_rows_that_do_not_fit_are_left_out_and_named(tmp_path):
    rows = dumps.own_rows(dumps.make_run(**BIG))
    rows[2]["trainer_logp"] = rows[2]["trainer_logp"][:-1]
    rows[4]["loss_mask"] = [0] * len(rows[4]["loss_mask"])
    rows[6]["loss_mask"][-1] = 2
    path = dumps.write_jsonl(tmp_path / "dump.jsonl", rows)
    path.write_text(path.read_text() + "{broken\n" + json.dumps(rows[0])[:50], encoding="utf-8")
    found = inspect([path], ["grpo"])
    sentence = found.checks[0].sentence
    assert sentence.startswith("4 of 82 rows were left out")
    assert "1 of 82 responses have no token to train on" in sentence
    assert any("trainer_logp has" in reason for reason in found.evidence.examples.values())
    assert "dump.jsonl, line 81: not JSON" in found.evidence.examples.values()
    assert found.evidence.responses == len(rows) - 3


def test_a_file_without_one_usable_row(tmp_path):
    rows = dumps.own_rows(dumps.make_run(steps=1, responses=2))
    for row in rows:
        row["behavior_logp"] = "none"
    with pytest.raises(ConfigError, match=r"none of the 2 rows can be used .*behavior_logp is not a list of numbers"):
        inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)])


def test_few_tokens_are_no_statistics(tmp_path):
    checks = checks_of(tmp_path, dumps.own_rows(dumps.make_run(steps=1, responses=3)))
    assert {checks[name].state for name in ("alignment", "temperature", "mean ratio")} == {"unknown"}
