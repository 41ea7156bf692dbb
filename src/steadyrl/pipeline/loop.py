"""The loop: one for the synchronous and the batch-wise asynchronous regime.

        trainer                                     engine
        collect batch k          <- waits for ---   generate batch k
        grade it
        evaluation due?  broadcast, submit    --->  (after batch k) load, evaluate
        submit batch k+1 with its version     --->  load, generate batch k+1
        train M optimizer steps on batch k          ... at the same time

In the synchronous regime a batch is submitted right before it is collected, so that only an evaluation
runs beside the training. Which version generates which batch is decided in `schedule.py` from step
numbers alone. The engine waits for commands; the trainer waits for the engine in `collect`, and in a
broadcast while two earlier ones have not been taken. After every optimizer step `generated = trained +
dropped + buffered` is checked, and before it the lag of every batch against the bound.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError, TrainingError
from steadyrl.pipeline.accounts import Clock, Counters, Group, Observer, consume, reward_metrics
from steadyrl.pipeline.backend import Backend, Generated
from steadyrl.pipeline.packing import advantages, pack
from steadyrl.pipeline.schedule import (
    anchor_version,
    batches_ahead,
    generation_version,
    is_broadcast_version,
    snapshots_needed,
)
from steadyrl.tasks.base import Task
from steadyrl.trainer.base import Learner
from steadyrl.trainer.checkpoint import load_snapshots, load_state, save_checkpoint
from steadyrl.types import GenerationRequest, Prompt, Rollout, RolloutBatch, StepReport

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
        self._backend = backend
        self._task = task
        self._evaluation = evaluation
        self._observer = observer
        self._checkpoints = checkpoints
        self._stop = stop
        self._clock = Clock(observer)
        self._counters = Counters()
        self._settled = Counters()  # without a batch that was only begun: what a checkpoint stores
        self._snapshots: dict[int, dict[str, Tensor]] = {}  # versions that batches still come from
        self._engine_version = -1
        self._evaluating = False  # an evaluation was submitted before the batch in flight
        self._evaluated = -1  # the version that was evaluated last
        self._prompts: dict[int, list[Prompt]] = {}  # of the batches in flight
        self._last_saved = -1

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        state = load_state(folder)
        self._learner.load(folder, state["step"])
        self._snapshots = load_snapshots(folder)
        self._counters = Counters(**state["counters"])
        self._settled = Counters(**state["counters"])
        self._evaluated = state["evaluated"]
        self._last_saved = state["step"]

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
        in_flight = False
        for batch_id in range(first, self._config.num_batches):
            if not in_flight:
                self._submit(batch_id)
            batch = self._collect(batch_id)
            if done == 0 and self._evaluation_due():
                self._submit_evaluation()
            in_flight = batches_ahead(self._pipeline) > 0 and batch_id + 1 < self._config.num_batches
            if in_flight:
                self._submit(batch_id + 1)
            try:
                goes_on = self._train(batch, done)
            finally:  # a batch that broke the training is the one to look at
                self._record(batch)
            if not goes_on:
                return False
            done = 0
        self._submit_evaluation()
        self._collect_evaluation()
        self._save()
        return True

    # ---- engine ----

    def _submit(self, batch_id: int) -> None:
        """Ask for a batch, from the version that the schedule wants."""
        self._broadcast(generation_version(self._pipeline, batch_id))
        count = self._pipeline.prompts_per_batch
        prompts = self._task.prompts("train", batch_id * count, count)
        self._prompts[batch_id] = prompts
        self._backend.submit(
            GenerationRequest(
                prompts=prompts,
                samples_per_prompt=self._pipeline.responses_per_prompt,
                max_response_tokens=self._config.sampling.max_response_tokens,
                temperature=self._config.sampling.temperature,
                seed=stream_seed(self._config.seed, f"rollouts/{batch_id}"),
                top_logprobs=self._config.objective.num_top_logprobs,
            )
        )

    def _broadcast(self, version: int) -> None:
        """Make the engine hold a version, if it does not already."""
        if version == self._engine_version:
            return
        start = time.monotonic()
        weights = self._learner.named_weights() if version == self._learner.version else self._snapshots[version]
        self._backend.broadcast(weights, version)
        self._engine_version = version
        self._clock.measure("broadcast", start, self._learner.version)

    def _wait(self, phase: str) -> Generated:
        start = time.monotonic()
        generated = self._backend.collect()
        self._clock.measure("wait", start, self._learner.version)
        for loaded in self._backend.loads():
            self._clock.engine("load", loaded.start_s, loaded.end_s, loaded.version)
        self._clock.engine(phase, generated.start_s, generated.end_s, self._learner.version)
        return generated

    def _collect(self, batch_id: int) -> RolloutBatch:
        """Wait for a batch and grade it."""
        self._collect_evaluation()
        rollouts = self._wait("generate").rollouts
        start = time.monotonic()
        prompts = self._prompts.pop(batch_id)
        _check_answer(batch_id, prompts, self._pipeline.responses_per_prompt, rollouts)
        for rollout in rollouts:
            if rollout.finish == "error":  # whatever text there is, it is not the policy's answer
                rollout.reward, rollout.status = 0.0, "error"
            else:
                rollout.reward, rollout.status = self._task.grade(prompts[rollout.group], rollout)
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
        self._broadcast(self._learner.version)
        self._backend.submit(self._evaluation.request())
        self._evaluating = True

    def _collect_evaluation(self) -> None:
        if self._evaluating:
            generated = self._wait("evaluate")
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
        self._counters.generated += len(batch.rollouts)
        for chunk in chunks[:done]:  # trained on before the run was resumed
            self._count(chunk)
        for index in range(done, steps):
            self._train_chunk(batch.batch_id, index, chunks[index])
            if index == steps - 1:
                self._settled = Counters(**vars(self._counters))
            rest = sum(len(group) for chunk in chunks[index + 1 :] for group in chunk)
            self._report(batch.batch_id, chunks[index], rest)
            self._keep_snapshot()
            every = self._config.checkpoint.every_steps
            if every and self._learner.version % every == 0 and self._learner.version < self._config.trainer.steps:
                self._save()
            if self._stop() and self._learner.version < self._config.trainer.steps:
                self._save()
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
        micro_batches = pack(
            rollouts, advantages(groups, self._config.objective), self._config.trainer.tokens_per_micro_batch
        )
        scoring = anchor_version(self._pipeline, self._config.objective.anchor, batch_id)
        old_weights = None if scoring is None else self._snapshots[scoring]
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

    def _report(self, batch_id: int, chunk: Sequence[Group], buffered: int) -> None:
        self._counters.check(buffered)
        counts = {f"counts/{name}": float(value) for name, value in vars(self._counters).items()}
        metrics = {**self._result.metrics, **reward_metrics(chunk), **counts, "counts/buffered": float(buffered)}
        seconds = self._clock.take()
        self._observer.step(StepReport(self._learner.version, batch_id, metrics, seconds, self._result.histograms))

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
        self._snapshots = {old: weights for old, weights in self._snapshots.items() if old in needed}
        if (is_broadcast_version(self._pipeline, version) or version == scoring) and version not in self._snapshots:
            self._snapshots[version] = {name: w.clone() for name, w in self._learner.named_weights().items()}

    def _save(self) -> None:
        """Write a checkpoint; results that are on their way and would be lost come first."""
        if self._learner.version == self._last_saved:
            return
        self._collect_evaluation()
        start = time.monotonic()
        step = self._learner.version
        snapshots = {version: weights for version, weights in self._snapshots.items() if version != step}
        state = {
            "step": step,
            "counters": vars(self._settled),  # a batch that was begun is generated, and counted, again on resume
            "evaluated": self._evaluated,
            "config": self._config.model_dump(mode="json"),
        }
        save_checkpoint(self._checkpoints, self._learner, state, snapshots, self._config.checkpoint.keep)
        self._last_saved = step
        self._clock.measure("checkpoint", start, step)


def stream_seed(seed: int, stream: str) -> int:
    """An independent seed for each named stream of random numbers of a run."""
    return int.from_bytes(hashlib.blake2s(f"{seed}/{stream}".encode(), digest_size=7).digest(), "big")


def _check_answer(batch_id: int, prompts: Sequence[Prompt], samples: int, rollouts: Sequence[Rollout]) -> None:
    """Raises EngineError unless the rollouts answer the prompts one after the other, `samples` times each."""
    expected = len(prompts) * samples
    if len(rollouts) != expected:
        raise EngineError(f"the engine returned {len(rollouts)} rollouts for batch {batch_id} instead of {expected}")
    for index, rollout in enumerate(rollouts):
        group = index // samples
        if (rollout.group, rollout.prompt_id) != (group, prompts[group].prompt_id):
            raise EngineError(
                f"rollout {index} of batch {batch_id} answers {rollout.prompt_id} in group {rollout.group} instead of "
                f"{prompts[group].prompt_id} in group {group}: the engine mixed up its answers"
            )


def _trainable(groups: Sequence[Group]) -> list[Group]:
    """Groups without an unusable rollout: the advantages of a broken group would be wrong."""
    return [group for group in groups if all(rollout.is_trainable for rollout in group)]
