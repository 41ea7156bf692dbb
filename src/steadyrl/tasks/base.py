"""What the pipeline asks of a task."""

from __future__ import annotations

from typing import Literal, Protocol

from steadyrl.types import Prompt, Rollout, Status

Split = Literal["train", "test"]


class Task(Protocol):
    """Prompts by position, and the grading of responses."""

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Prompts `start` to `start + count - 1` of an order fixed by the seed; train never ends."""
        ...

    def grade(self, prompt: Prompt, rollout: Rollout) -> tuple[float, Status]:
        """The reward of a response and why it was given."""
        ...
