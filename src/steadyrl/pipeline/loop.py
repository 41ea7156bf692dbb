"""The loop: one for all regimes.

        trainer                                     engine
        source.prepare(k)        broadcasts   --->  work on batch k, if it does not yet
        source.collect(k)        <- waits for ---   the groups of batch k
        grade them
        evaluation due?  broadcast, submit    --->  load, evaluate
        source.prepare_ahead(k+1)             --->  what may be started before batch k is trained on
        train M optimizer steps on batch k          ... at the same time

A regime is a `BatchSource`: synchronous and batch-wise generate batch by batch, from versions that `schedule.py` takes
from step numbers alone (`source.py`); streaming lets groups in and takes those that are finished (`streaming.py`). The
engine waits for commands; the trainer waits for the engine in `collect`, and in a broadcast while two earlier ones have
not been taken. After every optimizer step `generated = trained + dropped + buffered` is checked, and before it the lag
of every batch against the bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError, TrainingError
from steadyrl.pipeline.accounts import Clock, Counters, Group, Observer, consume, lag_parts, reward_metrics
from steadyrl.pipeline.backend import Backend
from steadyrl.pipeline.engine_link import EngineLink
from steadyrl.pipeline.packing import advantages, pack
from steadyrl.pipeline.schedule import anchor_version, is_broadcast_version, snapshots_needed
from steadyrl.pipeline.source import BatchSource, PromptGroup, ScheduledSource
from steadyrl.pipeline.streaming import StreamingSource
from steadyrl.tasks.base import Task, grade_rollouts
from steadyrl.trainer.base import Learner
from steadyrl.trainer.checkpoint import load_snapshots, load_state, save_checkpoint
from steadyrl.types import GenerationRequest, Rollout, RolloutBatch, StepReport

logger = logging.getLogger(__name__)


class Evaluation(Protocol):
    """Held-out prompts to generate for, and the scoring of the responses."""

    def request(self) -> GenerationRequest: ...
    def score(self, rollouts: Sequence[Rollout]) -> dict[str, Any]: ...


class TrainingLoop:
    """Runs a configuration to its last step, or until `stop()` says so."""

    def __init__(
        self,
        config: RunConfig,
        *,
        learner: Learner,
        backend: Backend,
        task: Task,
        evaluation: Evaluation,
        observer: Observer,
        checkpoints: Path,
        stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._pipeline = config.pipeline
        self._learner = learner
        self._task = task
        self._evaluation = evaluation
        self._observer = observer
        self._checkpoints = checkpoints
        self._stop = stop
        self._clock = Clock(observer)
        self._engine = EngineLink(learner, backend, self._clock)
        streams = config.pipeline.regime == "streaming"
        self._source: BatchSource = (StreamingSource if streams else ScheduledSource)(config, task, self._engine)
        self._counters = Counters()
        self._settled = Counters()  # without a batch that was only begun: what a checkpoint stores
        self._evaluating = False  # an evaluation was submitted before the batch in flight
        self._evaluated = -1  # the version that was evaluated last
        self._last_saved = -1

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        state = load_state(folder)
        self._learner.load(folder, state["step"])
        self._engine.snapshots = load_snapshots(folder)
        self._source.resume(folder, state["source"])
        self._counters = Counters(**state["counters"])
        self._settled = Counters(**state["counters"])
        self._evaluated = state["evaluated"]
        self._last_saved = state["step"]

    def describe(self) -> str:
        """Where the run stands, in a sentence."""
        evaluating = ", an evaluation is in flight" if self._evaluating else ""
        return f"the learner is at version {self._learner.version}{evaluating}, {self._source.describe()}"

    def run(self) -> bool:
        """Train; true if the last step was reached, false if stopped before.

        Any error, but not an interrupt, is raised after the last good weights were written to a checkpoint.
        """
        try:
            return self._run()
        except Exception as error:
            self._rescue(error)
            raise

    def _rescue(self, error: Exception) -> None:
        """Save what can be saved after an error, without another one taking its place."""
        if isinstance(error, TrainingError):  # after any other, nobody knows what the engine still answers
            try:
                self._collect_evaluation()
            except Exception as second:
                logger.warning("the evaluation in flight is lost: %s", second)
        self._evaluating = False
        try:
            self._save()
        except Exception as second:
            logger.warning("no checkpoint of step %d could be written: %s", self._learner.version, second)

    def _run(self) -> bool:
        self._keep_snapshot()
        first, done = divmod(self._learner.version, self._pipeline.steps_per_batch)
        for batch_id in range(first, self._config.num_batches):
            self._source.prepare(batch_id)
            self._collect_evaluation()
            batch = self._grade(batch_id, self._source.collect(batch_id))
            if done == 0 and self._evaluation_due():
                self._submit_evaluation()
            self._source.prepare_ahead(batch_id + 1)
            if not self._train(batch, done):
                return False
            done = 0
        self._collect_evaluation()  # one that was due beside the last batch
        self._submit_evaluation()
        self._collect_evaluation()
        self._save()
        return True

    def _grade(self, batch_id: int, groups: Sequence[PromptGroup]) -> RolloutBatch:
        start = time.monotonic()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        grades = grade_rollouts(self._task, [group.prompt for group in groups for _ in group.rollouts], rollouts)
        for rollout, grade in zip(rollouts, grades, strict=True):
            rollout.reward, rollout.status = grade.reward, grade.status
        self._clock.measure("grade", start, self._learner.version)
        return RolloutBatch(batch_id, self._pipeline.responses_per_prompt, rollouts)

    # ---- evaluation ----

    def _evaluation_due(self) -> bool:
        version, every = self._learner.version, self._config.evaluation.every_steps
        if version == self._evaluated:  # before this run was resumed
            return False
        if version == 0:
            return True
        before = version - self._pipeline.steps_per_batch
        return every > 0 and version // every > before // every

    def _submit_evaluation(self) -> None:
        """Have the present weights evaluated, while training goes on."""
        self._engine.broadcast(self._learner.version)
        self._engine.backend.submit(self._evaluation.request())
        self._evaluating = True

    def _collect_evaluation(self) -> None:
        if self._evaluating:
            generated = self._engine.collect("evaluate")
            self._evaluating = False
            row = self._evaluation.score(generated.rollouts)
            self._evaluated = row["version"]
            self._observer.evaluation(row)

    # ---- training ----

    def _train(self, batch: RolloutBatch, done: int) -> bool:
        """The optimizer steps on one batch, but for the first `done`; false when asked to stop."""
        steps = self._pipeline.steps_per_batch
        groups = batch.groups()
        share = len(groups) // steps
        chunks = [groups[start : start + share] for start in range(0, len(groups), share)]
        self._tally()
        for chunk in chunks[:done]:  # trained on before the run was resumed
            self._count(chunk)
        for index in range(done, steps):
            is_done = index == steps - 1
            try:
                self._train_chunk(batch.batch_id, index, chunks[index])
                if is_done:
                    self._source.release()
                    self._settled = Counters(**vars(self._counters))
                rest = sum(len(group) for chunk in chunks[index + 1 :] for group in chunk)
                self._report(batch.batch_id, chunks[index], rest)
            except BaseException:  # a batch that broke the training is the one to look at
                self._record(batch)
                raise
            self._keep_snapshot()
            goes_on = self._learner.version < self._config.trainer.steps
            stops = goes_on and self._stop()
            if is_done or stops:
                self._record(batch)  # before the checkpoint: a run that is killed after it goes on without this batch
            every = self._config.checkpoint.every_steps
            if stops or (goes_on and every and self._learner.version % every == 0):
                self._save()
            if stops:
                return False
        return True

    def _train_chunk(self, batch_id: int, index: int, chunk: Sequence[Group]) -> None:
        start = time.monotonic()
        groups = _trainable(chunk)
        if not groups:
            steps = self._pipeline.steps_per_batch
            share = f"batch {batch_id}" if steps == 1 else f"share {index + 1} of {steps} of batch {batch_id}"
            raise EngineError(
                f"every group of {share} ({chunk[0][0].prompt_id} to {chunk[-1][0].prompt_id}) has a rollout that "
                "cannot be trained on: the engine reported an error, sampled no token, or gave a log-probability that "
                "is not finite or above 0; look at the engine"
            )
        rollouts = [rollout for group in groups for rollout in group]
        self._check_lag(batch_id, rollouts)
        trainer = self._config.trainer
        micro_batches = pack(
            rollouts, advantages(groups, self._config.objective), trainer.tokens_per_micro_batch, trainer.ranks
        )
        scoring = anchor_version(self._pipeline, self._config.objective.anchor, batch_id)
        old_weights = None if scoring is None else self._engine.snapshots[scoring]
        version = self._learner.version
        self._result = self._learner.train_step(micro_batches, old_weights)
        consume(rollouts, micro_batches, self._result, version)
        self._count(chunk)
        self._clock.measure("train", start, self._learner.version)

    def _check_lag(self, batch_id: int, rollouts: Sequence[Rollout]) -> None:
        bound = self._pipeline.largest_lag
        oldest = min(rollout.version for rollout in rollouts)
        lag = self._learner.version - oldest
        assert lag <= bound, f"batch {batch_id} has lag {lag}, beyond the bound of {bound}"

    def _count(self, chunk: Sequence[Group]) -> None:
        trained = sum(len(group) for group in _trainable(chunk))
        self._counters.trained += trained
        self._counters.dropped += sum(len(group) for group in chunk) - trained

    def _tally(self) -> None:
        generated, given_up = self._source.tally()
        self._counters.generated += generated
        self._counters.dropped += given_up
        self._settled.dropped += given_up

    def _report(self, batch_id: int, chunk: Sequence[Group], rest: int) -> None:
        buffered = rest + self._source.buffered
        self._counters.check(buffered)
        lags = lag_parts(chunk, self._learner.version - 1, self._pipeline.largest_lag)
        counts = {f"counts/{name}": float(value) for name, value in vars(self._counters).items()}
        metrics = {**self._result.metrics, **reward_metrics(chunk), **counts, "counts/buffered": float(buffered)}
        metrics |= self._source.metrics() | self._engine.backend.metrics() | lags.means
        seconds = self._clock.take()
        histograms = {**self._result.histograms, **lags.histograms}
        self._observer.step(StepReport(self._learner.version, batch_id, metrics, seconds, histograms))
        if decision := self._source.observe(metrics):
            self._observer.message(f"after step {self._learner.version}: {decision}")

    def _record(self, batch: RolloutBatch) -> None:
        every = self._config.record.rollouts_every_batches
        if every and batch.batch_id % every == 0:
            self._observer.rollouts(batch)

    # ---- state ----

    def _keep_snapshot(self) -> None:
        """Copy the weights if a batch will come from them, and forget those that none will."""
        version = self._learner.version
        scoring = anchor_version(
            self._pipeline, self._config.objective.anchor, version // self._pipeline.steps_per_batch
        )
        needed = snapshots_needed(self._pipeline, version) | ({scoring} if scoring is not None else set())
        if not is_broadcast_version(self._pipeline, version) and version != scoring:
            needed.discard(version)
        self._engine.keep_snapshot(needed)

    def _write_state(self, folder: Path) -> dict[str, Any]:
        """The state of a checkpoint; what the source holds is written beside it."""
        self._tally()
        source = self._source.save(folder)
        trained, dropped = self._settled.trained, self._settled.dropped
        return {
            "step": self._learner.version,
            # a batch that was begun and is not held is generated, and counted, again on resume
            "counters": {"generated": trained + dropped + source["held"], "trained": trained, "dropped": dropped},
            "evaluated": self._evaluated,
            "source": source,
            "config": self._config.model_dump(mode="json"),
        }

    def _save(self) -> None:
        """Write a checkpoint; results that are on their way and would be lost come first."""
        if self._learner.version == self._last_saved:
            return
        self._collect_evaluation()
        start = time.monotonic()
        step = self._learner.version
        snapshots = {version: weights for version, weights in self._engine.snapshots.items() if version != step}
        save_checkpoint(self._checkpoints, self._learner, self._write_state, snapshots, self._config.checkpoint.keep)
        self._last_saved = step
        self._clock.measure("checkpoint", start, step)


def _trainable(groups: Sequence[Group]) -> list[Group]:
    """Groups without an unusable rollout: the advantages of a broken group would be wrong."""
    return [group for group in groups if all(rollout.is_trainable for rollout in group)]
