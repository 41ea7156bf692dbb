"""Whole runs on data sets: the paper's recipe scaled down, and the position in the data across a resume."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tasks.published import (
    AIME_H4_SCHEMA,
    DAPO_SCHEMA,
    DOLCI_SCHEMA,
    aime_h4_row,
    dapo_row,
    dolci_row,
    jsonl,
    parquet,
)

from steadyrl.errors import ConfigError
from steadyrl.recipe import build_config, load_config
from steadyrl.reports.recorder import read_rollouts, read_run, recorded_batches
from steadyrl.run import train
from steadyrl.tasks import math_dataset
from steadyrl.tasks.verifier import Verdict

PAPER = Path(__file__).parent.parent.parent / "recipes" / "paper_qwen3_30b_a3b.toml"
SMALL = [
    "model.path=bundled:tiny_moe",
    "engine.kind=local",
    "engine.urls=[]",
    "trainer.kind=local",
    "trainer.ranks=1",
    "pipeline.backend=inline",
    "pipeline.prompts_per_batch=3",
    "pipeline.responses_per_prompt=2",
    "sampling.max_response_tokens=4",
    "evaluation.max_response_tokens=4",
    "evaluation.samples_per_prompt=2",
    "task.instruction=",
    "task.verifier.workers=1",
]


class StubVerifier:
    """Every answer is wrong, without processes."""

    def __init__(self, *_settings) -> None: ...

    def grade(self, answers):
        return [Verdict(0.0, "wrong", answer.response) for answer in answers]

    def close(self) -> None: ...


def test_the_papers_recipe_says_what_appendix_f_says():
    config = load_config(PAPER)
    pipeline, objective, evaluation = config.pipeline, config.objective, config.evaluation
    assert (pipeline.prompts_per_batch, pipeline.responses_per_prompt, pipeline.responses_per_batch) == (256, 16, 4096)
    assert (config.trainer.steps, pipeline.steps_per_batch, pipeline.lag) == (544, 1, 8)
    assert (config.trainer.lr, config.trainer.betas, config.trainer.lr_warmup_steps) == (1e-6, (0.9, 0.98), 0)
    assert (objective.preset, objective.anchor, objective.unit) == ("sat-gspo", "rollout", "sequence")
    assert (objective.kl_coef, objective.advantage, config.model.routing_replay) == (1e-3, "group_standardized", True)
    boundary = {"rule": "sat", "low": 0.2, "high": 0.2, "alpha": 0.9, "kernel": "hill", "exponent": 2.0}
    assert boundary.items() <= objective.boundary.model_dump().items()
    assert (evaluation.every_steps, evaluation.samples_per_prompt, evaluation.prompts) == (5, 16, 0)
    assert (config.sampling.temperature, evaluation.top_p, evaluation.top_k) == (1.0, 1.0, 0)


def test_the_papers_recipe_runs_two_steps_with_a_tiny_model_and_small_files(tmp_path):
    pytest.importorskip("math_verify", reason="math-verify (extra `real`) is not installed")
    dapo = parquet(tmp_path / "dapo.parquet", [dapo_row(f"{i}+{i}=", str(2 * i)) for i in (1, 2, 1)], DAPO_SCHEMA)
    dolci = parquet(tmp_path / "dolci.parquet", [dolci_row(f"{i}+{i}=", str(2 * i)) for i in (2, 3)], DOLCI_SCHEMA)
    aime = parquet(tmp_path / "aime.parquet", [aime_h4_row("4+4=", "008")], AIME_H4_SCHEMA)
    sources = [f"task.train={json.dumps([dapo, dolci])}", f"task.test={json.dumps([aime])}"]
    config = load_config(PAPER, [*SMALL, *sources, f"run_dir={tmp_path / 'run'}", "trainer.steps=2"])
    assert train(config).finished
    run = read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps] == [1, 2]
    assert [row["version"] for row in run.evaluations] == [0, 2]
    row = run.evaluations[-1]
    assert (row["prompts"], row["k"], len(row["right"])) == (1, 2, 1)
    assert "math-verify" in row["grader"]
    data = json.loads((tmp_path / "run" / "data.json").read_text(encoding="utf-8"))
    assert data["train"]["problems"] == 3
    assert [(count["rows"], count["kept"]) for count in data["train"]["sources"]] == [(3, 2), (2, 1)]
    metrics = run.steps[0]["metrics"]
    statuses = ("right", "wrong", "unparsable", "truncated", "timeout", "error")
    assert sum(metrics[f"reward/{status}"] for status in statuses) == pytest.approx(1.0)


def test_a_run_whose_verifier_is_killed_again_and_again_gets_every_reward(tmp_path, monkeypatch):
    pytest.importorskip("math_verify", reason="math-verify (extra `real`) is not installed")
    data = jsonl(tmp_path / "train.jsonl", [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)])
    test = jsonl(tmp_path / "test.jsonl", [{"problem": "9+9=", "answer": "18"}])
    task = {"name": "math_dataset", "train": [data], "test": [test]}
    fixed = [*SMALL, "evaluation.prompts=0", "record.rollouts_every_batches=1", "trainer.steps=4"]
    killed = []

    class Killed(math_dataset.Verifier):
        def __init__(self, *settings):
            self.is_ready = False
            super().__init__(*settings)
            self.is_ready = True

        def grade(self, answers):
            if not self.is_ready:
                return super().grade(answers)
            for pid in self.worker_pids():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            roots = [rf"\boxed{{\sqrt{{{4 * n + 4}}}}}" for n in range(len(answers))]  # that a worker has to judge
            return super().grade([replace(answer, response=root) for answer, root in zip(answers, roots, strict=True)])

    rewards = {}
    for name, verifier in (("calm", StubVerifier), ("killed", Killed)):
        monkeypatch.setattr(math_dataset, "Verifier", verifier)
        run = build_config({"task": task}, [*fixed, f"run_dir={tmp_path / name}"])
        assert train(run).finished
        batches = [read_rollouts(file) for file in recorded_batches(read_run(tmp_path / name))]
        rewards[name] = [row["status"] for batch in batches for row in batch]
    assert len(set(killed)) > 4
    assert "error" not in rewards["killed"]
    assert len(rewards["killed"]) == len(rewards["calm"])


def test_no_problem_is_skipped_or_trained_on_twice_across_a_resume_at_an_epochs_end(tmp_path, monkeypatch):
    """Four problems in batches of 2: step 2 ends an epoch, and that is where the first process stops."""
    monkeypatch.setattr(math_dataset, "Verifier", StubVerifier)
    data = jsonl(tmp_path / "train.jsonl", [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)])
    test = jsonl(tmp_path / "test.jsonl", [{"problem": "9+9=", "answer": "18"}])

    def config(name: str, steps: int):
        task = {"name": "math_dataset", "train": [data], "test": [test]}
        overrides = [
            *SMALL,
            "pipeline.prompts_per_batch=2",
            "evaluation.prompts=0",
            "record.rollouts_every_batches=1",
            f"trainer.steps={steps}",
            f"run_dir={tmp_path / name}",
        ]
        return build_config({"task": task}, overrides)

    def trained_on(name: str) -> list[str]:
        batches = [read_rollouts(file) for file in recorded_batches(read_run(tmp_path / name))]
        return [row["prompt_text"] for batch in batches for row in batch[::2]]

    train(config("whole", 6))
    train(config("parts", 2))
    train(config("parts", 6), resume=True)
    assert trained_on("parts") == trained_on("whole")
    for epoch in range(3):
        problems = trained_on("parts")[4 * epoch : 4 * epoch + 4]
        assert sorted(problems) == [f"{i}+{i}=" for i in range(4)]

    jsonl(tmp_path / "train.jsonl", [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)])
    with pytest.raises(ConfigError, match=r"the train data of .* have changed"):
        train(config("parts", 8), resume=True)
