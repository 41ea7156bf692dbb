"""Runs on Ray: the numbers of the inline run, with several engines and ranks, and when some of them are killed."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from e2e.test_math_runs import PAPER, StubVerifier
from scale.ray_runs import FSDP, LAG_4, RECIPE, SIZES, STREAMING, Intruder, kill_one, numbers, rows, run, shared_cluster
from tasks.published import jsonl

from steadyrl.errors import ConfigError, LearnerLostError
from steadyrl.recipe import load_config
from steadyrl.run import train
from steadyrl.tasks import math_dataset

LOSS = ("objective/surrogate", "penalty/kl_ref")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One for all tests: a run uses a connection that is there, and leaves it as it is."""
    with shared_cluster(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def inline(tmp_path_factory) -> list[dict[str, Any]]:
    """The inline run, with the split of two engines."""
    return run(tmp_path_factory.mktemp("inline") / "run", *LAG_4, "pipeline.backend=inline")


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every metric of every step, to the float32 rounding of log-probabilities and what steps make of it."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        for name, value in numbers(other).items():
            there = numbers(one)[name]
            if value is None:
                assert there is None, (name, one["step"])
                continue
            tolerance = 1e-6 if name in LOSS else 1e-5
            assert math.isclose(there, value, rel_tol=1e-4, abs_tol=tolerance), (name, one["step"], there, value)


def test_two_engines_and_two_ranks_take_the_steps_of_the_inline_run(tmp_path, inline):
    found = run(tmp_path / "run", *LAG_4, *FSDP)
    assert len(found) == 20
    assert max(row["metrics"]["staleness/lag_max"] for row in found) == 4
    assert_close(found, inline)
    assert inline[-1]["metrics"]["optim/grad_norm"] > 0


def test_with_one_rank_they_are_the_numbers_of_the_inline_run_although_an_engine_was_killed(tmp_path, inline):
    intruder = Intruder(6, lambda: kill_one("EngineActor"))
    found = run(tmp_path / "run", *LAG_4, "pipeline.backend=ray", progress=intruder)
    assert [numbers(row) for row in found] == [numbers(row) for row in inline]
    assert [row["metrics"]["engine/restarts"] for row in (found[5], found[-1])] == [0, 1]
    assert sum("died and is started again" in text for text in intruder.messages) == 1


def test_what_travels_is_small_and_said(tmp_path):
    """R3: the bundled model has 2 layers with 2 experts for each token; an id takes a byte."""
    found = run(tmp_path / "run", *SIZES, "trainer.steps=2", "pipeline.backend=ray")
    metrics = found[-1]["metrics"]
    assert 0 < metrics["transport/rollout_bytes_per_token"] < 120
    assert 0 < metrics["transport/batch_bytes_per_token"] < 120


def test_a_dead_rank_goes_on_from_the_last_checkpoint(tmp_path, inline):
    intruder = Intruder(6, lambda: kill_one("RankActor"))
    settings = [*LAG_4, *FSDP, "checkpoint.every_steps=4"]
    found = run(tmp_path / "run", *settings, progress=intruder)
    assert sum("going on from the checkpoint of step 4" in text for text in intruder.messages) == 1
    assert_close(found, inline)
    counts = found[-1]["metrics"]
    assert counts["counts/trained"] == 20 * 16
    assert counts["counts/generated"] == counts["counts/trained"] + counts["counts/buffered"]


def test_a_dead_rank_without_a_checkpoint_ends_the_run_and_says_what_helps(tmp_path):
    intruder = Intruder(1, lambda: kill_one("RankActor"))
    with pytest.raises(LearnerLostError, match=r"set checkpoint.every_steps"):
        run(tmp_path / "run", *SIZES, "trainer.steps=4", "pipeline.backend=ray", progress=intruder)
    assert len(rows(tmp_path / "run")) == 1


def test_streaming_survives_a_killed_engine_with_every_group_trained_once(tmp_path):
    intruder = Intruder(3, lambda: kill_one("EngineActor"))
    settings = [*STREAMING, "trainer.steps=8", "record.rollouts_every_batches=1", "pipeline.backend=ray"]
    found = run(tmp_path / "run", *settings, progress=intruder)
    assert found[-1]["metrics"]["engine/restarts"] == 1
    assert max(row["metrics"]["staleness/lag_max"] for row in found) <= 3
    trained = Counter(_prompts(tmp_path / "run"))
    assert set(trained.values()) == {4}  # every prompt once, with its responses
    assert len(trained) == 8 * 4
    last = found[-1]["metrics"]
    assert last["counts/generated"] == last["counts/trained"] + last["counts/buffered"]


def test_the_papers_recipe_runs_on_ranks_with_a_tiny_model_and_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr(math_dataset, "Verifier", StubVerifier)
    data = jsonl(tmp_path / "data.jsonl", [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)])
    test = jsonl(tmp_path / "test.jsonl", [{"problem": "9+9=", "answer": "18"}])
    small = [
        "model.path=bundled:tiny_moe",
        "engine.kind=local",
        "engine.urls=[]",
        "engine.replicas=2",
        "trainer.ranks=2",
        "trainer.steps=2",
        "pipeline.prompts_per_batch=3",
        "pipeline.responses_per_prompt=2",
        "sampling.max_response_tokens=4",
        "evaluation.max_response_tokens=4",
        "task.instruction=",
        f"task.train={json.dumps([data])}",
        f"task.test={json.dumps([test])}",
    ]
    assert train(load_config(PAPER, [*small, f"run_dir={tmp_path / 'run'}"])).finished
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    assert found[-1]["metrics"]["counts/trained"] == 2 * 3 * 2


def _prompts(folder: Path) -> list[str]:
    files = sorted((folder / "rollouts").glob("batch_*.jsonl"))
    return [json.loads(line)["prompt_id"] for file in files for line in file.read_text().splitlines()]


def test_a_cluster_without_room_says_what_it_lacks(tmp_path):
    settings = [*SIZES, "pipeline.backend=ray", "engine.replicas=9", "engine.start_timeout_s=2"]
    with pytest.raises(ConfigError, match="ask for 10 CPU: it lacks 6 CPU"):
        train(load_config(RECIPE, [*settings, f"run_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()
