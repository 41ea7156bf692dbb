"""What the loop asks of a regime, and the two regimes whose schedule is a function of step numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError
from steadyrl.pipeline.engine_link import EngineLink
from steadyrl.pipeline.schedule import batches_ahead, generation_version
from steadyrl.pipeline.seeds import stream_seed
from steadyrl.tasks.base import Task
from steadyrl.types import GenerationRequest, Prompt, Rollout


@dataclass
class PromptGroup:
    """The responses to one prompt, as they came from the engine."""

    prompt: Prompt
    rollouts: list[Rollout]


class BatchSource(Protocol):
    """Where the trainer's batches come from."""

    def prepare(self, batch_id: int) -> None:
        """Before batch `batch_id` is collected: have the engine work on it, if it does not yet."""
        ...

    def prepare_ahead(self, batch_id: int) -> None:
        """Before the batch in front of `batch_id` is trained on: start what may be started already."""
        ...

    def collect(self, batch_id: int) -> list[PromptGroup]:
        """Wait for the groups of a batch.

        Raises:
            EngineError: the engine failed, died or mixed up its answers.
        """
        ...

    def release(self) -> None:
        """The batch collected last was trained on."""
        ...

    @property
    def buffered(self) -> int:
        """Rollouts that were generated and wait; those of the batch collected last are not among them."""
        ...

    def tally(self) -> tuple[int, int]:
        """Rollouts that were generated, and how many of these were given up, since the last call."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the step report says about this source; since the last call."""
        ...

    def observe(self, metrics: dict[str, float]) -> str | None:
        """Take in what an optimizer step measured; a sentence if that changes what comes next."""
        ...

    def describe(self) -> str:
        """What is being waited for; another thread may ask at any moment."""
        ...

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what a checkpoint needs beside its state, and return that state as JSON.

        `held` in it counts the rollouts that were written.
        """
        ...

    def resume(self, folder: Path, state: dict[str, Any]) -> None: ...


def group_request(config: RunConfig, prompts: Sequence[Prompt], start: int) -> GenerationRequest:
    """The responses to training prompts `start`, `start + 1`, ...; each has random numbers of its own."""
    sampling = config.sampling
    return GenerationRequest(
        prompts=list(prompts),
        samples_per_prompt=config.pipeline.responses_per_prompt,
        max_response_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        seed=stream_seed(config.seed, "rollouts"),
        first=start,
        top_logprobs=config.objective.num_top_logprobs,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
        long_prompts=sampling.long_prompts,
    )


class ScheduledSource:
    """Synchronous and batch-wise: a batch is generated whole, from the version that `schedule.py` names."""

    def __init__(self, config: RunConfig, task: Task, engine: EngineLink) -> None:
        self._config = config
        self._pipeline = config.pipeline
        self._task = task
        self._engine = engine
        self._prompts: dict[int, list[Prompt]] = {}  # of the batches in flight
        self._generated = 0  # rollouts since the last tally

    def prepare(self, batch_id: int) -> None:
        if batch_id in self._prompts:
            return
        self._engine.broadcast(generation_version(self._pipeline, batch_id))
        count = self._pipeline.prompts_per_batch
        prompts = self._task.prompts("train", batch_id * count, count)
        self._prompts[batch_id] = prompts
        self._engine.backend.submit(group_request(self._config, prompts, batch_id * count))

    def prepare_ahead(self, batch_id: int) -> None:
        if batches_ahead(self._pipeline) > 0 and batch_id < self._config.num_batches:
            self.prepare(batch_id)

    def collect(self, batch_id: int) -> list[PromptGroup]:
        rollouts = self._engine.collect("generate").rollouts
        prompts = self._prompts.pop(batch_id)
        samples = self._pipeline.responses_per_prompt
        _check_answer(batch_id, prompts, samples, rollouts)
        self._generated += len(rollouts)
        return [
            PromptGroup(prompt, rollouts[index * samples : (index + 1) * samples])
            for index, prompt in enumerate(prompts)
        ]

    def release(self) -> None:
        """A batch that is generated ahead is generated again after a resume: nothing is kept."""

    buffered = 0

    def tally(self) -> tuple[int, int]:
        generated, self._generated = self._generated, 0
        return generated, 0

    def metrics(self) -> dict[str, float]:
        return {}

    def observe(self, metrics: dict[str, float]) -> None:
        """The schedule does not depend on what is measured."""

    def describe(self) -> str:
        batches = ", ".join(str(batch_id) for batch_id in list(self._prompts))
        return f"batch {batches} is in the engine" if batches else "nothing is in the engine"

    def save(self, folder: Path) -> dict[str, Any]:
        return {"held": 0}

    def resume(self, folder: Path, state: dict[str, Any]) -> None:
        """The schedule knows from the step alone what comes next."""


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
