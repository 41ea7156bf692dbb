"""Rates that are measured in a run whose rates are known, because its clock was made up."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tomli_w
from planning.workload import FIXED, RATES, SHAPE

from steadyrl.errors import ConfigError
from steadyrl.planning import measure
from steadyrl.planning.engine_clock import decode_steps
from steadyrl.planning.simulate import simulate
from steadyrl.recipe import build_config

PROMPTS, RESPONSES, PROMPT_TOKENS = 4, 3, 5
OTHER_S, RECORD_S, TRANSFER_S, GRADE_S = 0.03, 0.07, 0.006, 0.024
RECIPE = [
    "pipeline.regime=sync",
    "pipeline.lag=0",
    f"pipeline.prompts_per_batch={PROMPTS}",
    f"pipeline.responses_per_prompt={RESPONSES}",
    "record.rollouts_every_batches=2",
    "evaluation.every_steps=0",
    "evaluation.prompts=1",
    "evaluation.samples_per_prompt=1",
    "trainer.steps=30",
    "engine.max_sequences=8",
]


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setattr(measure, "count_model", lambda path: SHAPE)


def write_run(folder, overrides=(), steps=30):
    """A synchronous run at the rates of `RATES`, as its folder would tell it."""
    config = build_config({}, [*RECIPE, *overrides])
    rng = np.random.default_rng(5)
    now, metrics, timeline, before = 0.0, [], [], 0.0

    def event(actor, phase, seconds, step, start=None):
        nonlocal now
        begin = now if start is None else start
        timeline.append({"actor": actor, "phase": phase, "start_s": begin, "end_s": begin + seconds, "step": step})
        if start is None:
            now += seconds
        return begin + seconds

    (folder / "rollouts").mkdir(parents=True)
    for batch in range(steps):
        lengths = rng.integers(3, 20, PROMPTS * RESPONSES)
        start = now
        event("trainer", "broadcast", 0.04, batch)
        loaded = event("engine", "load", 0.1, batch, now)
        taken = decode_steps(lengths.tolist(), 8) * 0.01 + lengths.sum() * 0.001
        generated = event("engine", "generate", taken, batch, loaded)
        event("trainer", "wait", generated + TRANSFER_S - now, batch)
        event("trainer", "grade", GRADE_S, batch)
        tokens = int(lengths.sum()) + PROMPTS * RESPONSES * PROMPT_TOKENS
        train = 0.2 + tokens / 1_000
        event("trainer", "train", train, batch + 1)
        now += OTHER_S
        seconds = {"broadcast": 0.04, "wait": generated + TRANSFER_S - start - 0.04, "grade": GRADE_S, "train": train}
        seconds["step"] = now - start + before
        metrics.append(
            {
                "step": batch + 1,
                "batch_id": batch,
                "metrics": {"sampled_tokens": float(lengths.sum())},
                "seconds": seconds,
                "histograms": {},
            }
        )
        before = 0.0
        if config.record.rollouts_every_batches and batch % config.record.rollouts_every_batches == 0:
            now += RECORD_S
            before = RECORD_S  # the next step's time begins when this one's ended
            rows = [
                {
                    "prompt_id": f"p{index // RESPONSES}",
                    "group": index // RESPONSES,
                    "loss_mask": [0] * PROMPT_TOKENS + [1] * int(length),
                    "text": "",
                    "reward": 0.0,
                    "status": "wrong",
                }
                for index, length in enumerate(lengths)
            ]
            path = folder / "rollouts" / f"batch_{batch:06d}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    for name, rows in (("metrics", metrics), ("timeline", timeline)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return metrics


def test_the_rates_of_a_run_come_back(tmp_path):
    write_run(tmp_path / "run")
    speed = measure.measured_speed(tmp_path / "run")
    found = speed.rates.model_dump()
    found.pop("checkpoint_bytes_per_s")  # the run wrote none
    expected = {**RATES, "record_batch_s": RECORD_S}
    expected.pop("checkpoint_bytes_per_s")
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_lengths_are_those_of_the_recorded_rollouts(tmp_path):
    write_run(tmp_path / "run")
    lengths = measure.measured_speed(tmp_path / "run").lengths
    assert len(lengths.groups) == 15 * PROMPTS
    assert {(group.prompt, len(group.responses)) for group in lengths.groups} == {(PROMPT_TOKENS, RESPONSES)}
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    recorded = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sum(int(group.responses.sum()) for group in lengths.groups) == sum(sum(r["loss_mask"]) for r in recorded)


def test_the_run_is_predicted_from_itself(tmp_path):
    metrics = write_run(tmp_path / "run")
    measured = np.mean([row["seconds"]["step"] for row in metrics[1:]])
    speed = measure.measured_speed(tmp_path / "run")
    assert simulate(build_config({}, RECIPE), SHAPE, speed, steps=30).step_s == pytest.approx(measured, rel=0.02)


def test_batches_of_one_size_give_one_rate_and_no_negative_one():
    # a constant and a part in proportion cannot be told apart here; together they are right
    a, b = measure.fit([(10.0, 100.0)] * 4, [1.0, 1.1, 0.9, 1.0])
    assert a >= 0
    assert b >= 0
    assert 10 * a + 100 * b == pytest.approx(1.0)
    # more tokens and less time: nothing in proportion to tokens is left
    assert measure.fit([(1.0, 10.0), (1.0, 20.0)], [2.0, 1.0]) == pytest.approx((1.5, 0.0))
    assert measure.fit([(1.0, 10.0), (1.0, 20.0)], [1.0, 3.0]) == pytest.approx((0.0, (10 + 60) / 500))


@pytest.mark.parametrize(
    ("overrides", "steps", "message"),
    [
        (["pipeline.regime=streaming", "pipeline.lag=1"], 30, "streamed.*regime=sync or batch"),
        ([], 6, "has 6 optimizer steps, and 7 are needed"),
        (["record.rollouts_every_batches=20"], 30, "recorded the rollouts of 2 batches, and 3 are needed"),
    ],
)
def test_a_run_that_says_too_little_is_refused(tmp_path, overrides, steps, message):
    write_run(tmp_path / "run", overrides, steps)
    with pytest.raises(ConfigError, match=message):
        measure.measured_speed(tmp_path / "run")


def test_there_has_to_be_a_run(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        measure.measured_speed(tmp_path / "nothing")


def test_stated_and_recorded_lengths_give_the_same_step(tmp_path):
    """The simulation does not care where lengths come from."""
    speed = measure.Speed
    groups = measure.RecordedLengths((measure.GroupLengths(5, np.array([10, 10, 10])),))
    config = build_config({}, RECIPE)
    rates = measure.Rates(**RATES)
    steps = [
        simulate(config, SHAPE, speed(rates, lengths, None, frozenset(), "", 30), steps=20).step_s
        for lengths in (groups, FIXED)
    ]
    assert steps[0] == pytest.approx(steps[1])
