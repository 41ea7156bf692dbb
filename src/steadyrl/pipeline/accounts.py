"""The books of a run: what was generated and where it went, what took how long, what was rewarded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.trainer.base import StepResult
from steadyrl.types import Consumed, Rollout, RolloutBatch, Status, StepReport, TrainBatch, pooled

Group = list[Rollout]


class Observer(Protocol):
    """Where a run is written to and shown."""

    def step(self, report: StepReport) -> None: ...
    def rollouts(self, batch: RolloutBatch) -> None: ...
    def evaluation(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def event(self, actor: str, phase: str, start_s: float, end_s: float, step: int) -> None: ...


@dataclass
class Counters:
    """Rollouts since the start of the run: generated = trained + dropped + buffered."""

    generated: int = 0
    trained: int = 0
    dropped: int = 0

    def check(self, buffered: int) -> None:
        total = self.trained + self.dropped + buffered
        assert self.generated == total, f"{self.generated} rollouts generated, {total} accounted for"


@dataclass
class Clock:
    """Seconds per phase since the last step, and the same as events for the timeline."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)
    step_start_s: float = field(default_factory=time.monotonic)
    engine_free_s: float | None = None  # when the engine finished what it did last

    def measure(self, phase: str, start_s: float, step: int) -> None:
        end_s = time.monotonic()
        self._add(phase, end_s - start_s)
        self.observer.event("trainer", phase, start_s, end_s, step)

    def engine(self, phase: str, start_s: float, end_s: float, step: int) -> None:
        if self.engine_free_s is not None:
            self._add("engine_idle", start_s - self.engine_free_s)
        self.engine_free_s = end_s
        self._add(phase, end_s - start_s)
        self.observer.event("engine", phase, start_s, end_s, step)

    def take(self) -> dict[str, float]:
        now = time.monotonic()
        seconds, self.seconds = {**self.seconds, "step": now - self.step_start_s}, {}
        self.step_start_s = now
        return seconds

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def consume(rollouts: Sequence[Rollout], micro_batches: Sequence[TrainBatch], result: StepResult, version: int) -> None:
    """Note on every rollout what the optimizer step on it had to say; `version` is the policy before the step."""
    for batch, logp, old_logp in zip(micro_batches, result.logp, result.old_logp, strict=True):
        for row, source in enumerate(batch.sources):
            rollout = rollouts[source]
            rollout.consumed = Consumed(
                version=version,
                advantage=float(batch.advantage[row]),
                trainer_logp=_per_token(rollout, logp[row]),
                old_logp=None if old_logp is None else _per_token(rollout, old_logp[row]),
            )


def _per_token(rollout: Rollout, targets: Tensor) -> NDArray[np.float32]:
    """[n] from what a padded row [W] says about the tokens after the first; 0 where not sampled."""
    logp = np.zeros(len(rollout.token_ids), np.float32)
    logp[1:] = targets[: len(logp) - 1].cpu().numpy()
    return np.where(rollout.loss_mask, logp, np.float32(0))


@dataclass(frozen=True)
class LagParts:
    """The lag of the tokens of a step, split where they were: still being generated, or finished and queued."""

    means: dict[str, float]
    histograms: dict[str, list[float]]  # tokens at 0, 1, 2, ... optimizer steps


def lag_parts(groups: Sequence[Group], version: int, largest_lag: int) -> LagParts:
    """N = N_PQS + N_IQS for every token trained on (arXiv 2607.18722, Eq. 25).

    N_PQS are the versions that came while its response was being generated, N_IQS those while it was queued.

    Args:
        version: of the policy before the step.
    """
    generating, queued = np.zeros(largest_lag + 1), np.zeros(largest_lag + 1)
    for rollout in (rollout for group in groups for rollout in group if rollout.is_trainable):
        versions = rollout.versions[rollout.loss_mask]
        finished = max(rollout.finished_version, int(versions.max()))
        np.add.at(generating, finished - versions, 1)
        queued[version - finished] += len(versions)
    tokens, lags = max(generating.sum(), 1.0), np.arange(largest_lag + 1)
    parts = {"lag_generating": generating, "lag_queued": queued}
    return LagParts(
        means={f"staleness/{name}_mean": float(counts @ lags / tokens) for name, counts in parts.items()},
        histograms={name: counts.tolist() for name, counts in parts.items()},
    )


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, statuses and lengths of an optimizer step's rollouts, dropped ones included."""
    rollouts = [rollout for group in groups for rollout in group]
    number = len(rollouts)
    without_signal = sum(len({rollout.reward for rollout in group}) == 1 for group in groups)
    tokens = sum(rollout.num_sampled for rollout in rollouts)
    sums = {
        "reward/mean": (sum(rollout.reward for rollout in rollouts), number),
        "reward/groups_without_signal": (without_signal, len(groups)),
        "prompts/too_long": (sum(group[0].finish == "too_long" for group in groups), len(groups)),
        "response/tokens": (tokens, number),
    }
    for status in get_args(Status):
        sums[f"reward/{status}"] = (sum(rollout.status == status for rollout in rollouts), number)
    return {**pooled(sums), "sampled_tokens": float(tokens)}
