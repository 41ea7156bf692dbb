"""The loop with a stub engine and a stub learner: what it refuses, what it drops, what it saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError, TrainingError
from steadyrl.pipeline.backend import Generated
from steadyrl.pipeline.loop import TrainingLoop
from steadyrl.tasks.base import Grade
from steadyrl.trainer.base import StepResult
from steadyrl.types import GenerationRequest, Prompt, Rollout, RolloutBatch, StepReport

Change = Callable[[list[Rollout]], list[Rollout] | None]


class StubLearner:
    def __init__(self) -> None:
        self.version = 0
        self.fails: dict[int, BaseException] = {}  # by version
        self.save_error: Exception | None = None

    def train_step(self, micro_batches, old_actor):
        if self.version in self.fails:
            raise self.fails[self.version]
        self.version += 1
        logp = [batch.behavior_logp + 0.5 * batch.loss_mask for batch in micro_batches]
        return StepResult({}, {}, logp, [None for _ in micro_batches])

    def named_weights(self):
        return {"w": torch.full((2,), float(self.version))}

    def save(self, folder: Path) -> None:
        if self.save_error:
            raise self.save_error
        (folder / "model").write_text(str(self.version))

    def load(self, folder: Path, version: int) -> None:
        self.version = version


class StubBackend:
    """Answers in full and in order, unless a change for the n-th answer is given."""

    def __init__(self) -> None:
        self.version = -1
        self.requests: list[tuple[GenerationRequest, int]] = []
        self.changes: dict[int, Change | Exception] = {}
        self.collected = 0

    def broadcast(self, weights, version: int) -> None:
        self.version = version

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append((request, self.version))

    def collect(self) -> Generated:
        request, version = self.requests.pop(0)
        change = self.changes.get(self.collected)
        self.collected += 1
        if isinstance(change, Exception):
            raise change
        rollouts = [
            rollout(prompt, group, version)
            for group, prompt in enumerate(request.prompts)
            for _ in range(request.samples_per_prompt)
        ]
        if change:
            rollouts = change(rollouts) or rollouts
        return Generated(rollouts, 0.0, 0.0)

    def loads(self):
        return []

    def metrics(self):
        return {}

    def close(self) -> None: ...


class StubTask:
    error: BaseException | None = None

    def prompts(self, split, start: int, count: int) -> list[Prompt]:
        return [Prompt(f"{split}/{i}", np.array([1, 2], np.int32), "", "") for i in range(start, start + count)]

    def grade_all(self, prompts, responses):
        if self.error and any(prompt.prompt_id == "train/4" for prompt in prompts):
            raise self.error
        return [Grade(1.0, "right", None) for _ in responses]


class StubEvaluation:
    def request(self) -> GenerationRequest:
        return GenerationRequest(StubTask().prompts("test", 0, 1), 1, 2, 1.0, 0)

    def score(self, rollouts) -> dict[str, Any]:
        return {"version": rollouts[0].version}


class StubObserver:
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.batches: list[RolloutBatch] = []
        self.evaluations: list[dict[str, Any]] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def rollouts(self, batch: RolloutBatch) -> None:
        self.batches.append(batch)

    def evaluation(self, row: dict[str, Any]) -> None:
        self.evaluations.append(row)

    def event(self, *_event) -> None: ...
    def message(self, text: str) -> None: ...


def rollout(prompt: Prompt, group: int, version: int) -> Rollout:
    mask = np.array([False, False, True, True])
    return Rollout(
        prompt_id=prompt.prompt_id,
        group=group,
        token_ids=np.array([1, 2, 3, 4], np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        routed_experts=None,
        finish="stop",
        text="",
    )


class Parts:
    """A loop of four prompts with four responses each, and all that it is made of."""

    def __init__(
        self, folder: Path, evaluation: dict[str, Any] | None = None, saves_every: int = 0, **pipeline: Any
    ) -> None:
        shape = {"regime": "sync", "lag": 0, "prompts_per_batch": 4, "responses_per_prompt": 4} | pipeline
        config = RunConfig.model_validate(
            {
                "trainer": {"steps": 4},
                "pipeline": shape,
                "evaluation": evaluation or {},
                "record": {"rollouts_every_batches": 1},
                "checkpoint": {"every_steps": saves_every},
            }
        )
        self.learner, self.backend, self.task = StubLearner(), StubBackend(), StubTask()
        self.observer, self.folder = StubObserver(), folder
        self.loop = TrainingLoop(
            config,
            learner=self.learner,
            backend=self.backend,
            task=self.task,
            evaluation=StubEvaluation(),
            observer=self.observer,
            checkpoints=folder,
            stop=lambda: False,
        )

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step_*"))


@pytest.fixture
def parts(tmp_path) -> Parts:
    return Parts(tmp_path)


def unusable(rollout: Rollout) -> None:
    rollout.behavior_logp[-1] = np.nan


def counts(report: StepReport) -> list[float]:
    return [report.metrics[f"counts/{name}"] for name in ("generated", "trained", "dropped", "buffered")]


def test_one_nan_drops_its_group_and_is_counted(parts):
    parts.backend.changes[0] = lambda rollouts: unusable(rollouts[6])
    assert parts.loop.run()
    assert counts(parts.observer.steps[0]) == [16, 12, 4, 0]
    assert counts(parts.observer.steps[-1]) == [64, 60, 4, 0]


def test_an_evaluation_beside_the_last_batch_does_not_swallow_the_last_one(tmp_path):
    parts = Parts(tmp_path, evaluation={"every_steps": 1})
    assert parts.loop.run()
    assert [row["version"] for row in parts.observer.evaluations] == [0, 1, 2, 3, 4]


def test_a_recorded_rollout_says_what_the_trainer_made_of_it(parts):
    parts.backend.changes[2] = lambda rollouts: unusable(rollouts[6])  # batch 1, after the first evaluation
    assert parts.loop.run()
    first = parts.observer.batches[0].rollouts[5]
    assert first.consumed is not None
    assert first.consumed.version == 0
    assert first.consumed.trainer_logp.tolist() == [0.0, 0.0, -0.5, -0.5]  # what the stub learner answers
    assert first.consumed.old_logp is None
    dropped = [r.consumed is None for r in parts.observer.batches[1].rollouts]
    assert dropped == [False] * 4 + [True] * 4 + [False] * 8
    assert {r.consumed.version for r in parts.observer.batches[3].rollouts if r.consumed} == {3}


def test_a_batch_is_recorded_before_a_checkpoint_says_that_it_was_trained_on(tmp_path):
    """A run that is killed between the two goes on behind the checkpoint."""
    parts, recorded = Parts(tmp_path, saves_every=1), []

    class Learner(StubLearner):
        def save(self, folder: Path) -> None:
            recorded.append(len(parts.observer.batches))
            super().save(folder)

    parts.learner.__class__ = Learner
    assert parts.loop.run()
    assert recorded == [1, 2, 3, 4]


def test_a_batch_that_breaks_the_training_is_recorded(parts):
    parts.learner.fails[1] = TrainingError("not finite")
    with pytest.raises(TrainingError):
        parts.loop.run()
    assert [batch.batch_id for batch in parts.observer.batches] == [0, 1]
    assert all(r.consumed is None for r in parts.observer.batches[1].rollouts)


def test_a_share_without_a_usable_group_is_named(tmp_path):
    parts = Parts(tmp_path, steps_per_batch=2)
    parts.backend.changes[0] = lambda rollouts: [unusable(r) for r in rollouts[8::4]] and None
    with pytest.raises(EngineError, match=r"share 2 of 2 of batch 0 \(train/2 to train/3\)"):
        parts.loop.run()
    assert parts.saved == ["step_000001"]


def test_a_batch_without_a_usable_group_is_named(parts):
    parts.backend.changes[0] = lambda rollouts: [unusable(r) for r in rollouts] and None
    with pytest.raises(EngineError, match=r"every group of batch 0 \(train/0 to train/3\)"):
        parts.loop.run()


def set_group(group: int) -> Change:
    def change(rollouts: list[Rollout]) -> None:
        rollouts[5].group = group

    return change


def set_prompt(rollouts: list[Rollout]) -> None:
    rollouts[5].prompt_id = "train/9"


def swap(rollouts: list[Rollout]) -> None:
    rollouts[3], rollouts[4] = rollouts[4], rollouts[3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rollouts: rollouts[:-1], "15 rollouts for batch 0 instead of 16"),
        (lambda rollouts: [*rollouts, rollouts[-1]], "17 rollouts for batch 0 instead of 16"),
        (lambda rollouts: [*rollouts[:-1], rollouts[0]], "rollout 15 of batch 0 answers train/0 in group 0"),
        (set_group(4), "rollout 5 of batch 0 answers train/1 in group 4 instead of train/1 in group 1"),
        (set_group(-3), "rollout 5 of batch 0 answers train/1 in group -3"),
        (set_prompt, "rollout 5 of batch 0 answers train/9 in group 1 instead of train/1"),
        (swap, "rollout 3 of batch 0 answers train/1 in group 1 instead of train/0 in group 0"),
    ],
)
def test_an_answer_to_another_request_is_refused(parts, change, message):
    parts.backend.changes[0] = change
    with pytest.raises(EngineError, match=message):
        parts.loop.run()
    assert not parts.observer.steps


def test_a_failed_rollout_earns_nothing_whatever_the_task_says(parts):
    def change(rollouts: list[Rollout]) -> None:
        rollouts[2].finish = "error"

    parts.backend.changes[0] = change
    assert parts.loop.run()
    graded = parts.observer.batches[0].rollouts
    assert (graded[2].reward, graded[2].status) == (0.0, "error")
    assert (graded[3].reward, graded[3].status) == (1.0, "right")
    assert counts(parts.observer.steps[0]) == [16, 12, 4, 0]


@pytest.mark.parametrize("error", [ZeroDivisionError("a scorer"), OSError("a disk"), EngineError("an engine")])
def test_any_error_leaves_the_last_good_weights(parts, error):
    parts.task.error = error  # in batch 1
    with pytest.raises(type(error), match=str(error)):
        parts.loop.run()
    assert parts.saved == ["step_000001"]


def test_an_interrupt_ends_at_once(parts):
    parts.task.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        parts.loop.run()
    assert parts.saved == []


@pytest.mark.parametrize("error", [ZeroDivisionError("first"), EngineError("first"), TrainingError("first")])
def test_a_failing_save_does_not_hide_the_error(parts, error, caplog):
    parts.learner.fails[1] = error
    parts.learner.save_error = OSError("no space left")
    with caplog.at_level(logging.WARNING), pytest.raises(type(error), match="first"):
        parts.loop.run()
    assert "no space left" in caplog.text


def test_a_training_error_waits_for_the_evaluation_in_flight(parts):
    parts.learner.fails[0] = TrainingError("a gradient")
    with pytest.raises(TrainingError):
        parts.loop.run()
    assert parts.observer.evaluations == [{"version": 0}]
    assert parts.saved == ["step_000000"]


def test_a_training_error_is_kept_and_saved_when_the_engine_dies_too(parts, caplog):
    parts.learner.fails[0] = TrainingError("a gradient")
    parts.backend.changes[1] = EngineError("the engine died")  # the evaluation of version 0
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError, match="a gradient"):
        parts.loop.run()
    assert "the engine died" in caplog.text
    assert parts.saved == ["step_000000"]


@pytest.mark.parametrize("error", [EngineError("an answer"), ZeroDivisionError("a bug")])
def test_after_other_errors_nobody_waits_for_the_engine(parts, error):
    parts.learner.fails[0] = error
    with pytest.raises(type(error)):
        parts.loop.run()
    assert parts.backend.collected == 1  # the batch; not the evaluation behind it
    assert parts.saved == ["step_000000"]
