"""What the pipeline and the evaluation ask of a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from steadyrl.types import Prompt, Rollout, Status

Split = Literal["train", "test"]


class Grade(NamedTuple):
    """What a response is worth, why, and the answer that was found in it, in one spelling."""

    reward: float
    status: Status
    answer: str | None


class Task(Protocol):
    """Prompts by position, and the grading of responses."""

    grader: str  # what grades, with its version
    template: str  # how prompts were rendered, see `template_name`
    test_size: int | None  # prompts of the test split; None where there is no end to them
    data: dict[str, Any]  # what was read from files, as JSON, with checksums; empty for a procedural task

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Prompts `start` to `start + count - 1` of an order fixed by the seed; train never ends."""
        ...

    def grade_all(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Grade]:
        """Grades of finished responses, in order; response i answers prompt i."""
        ...

    def close(self) -> None:
        """End what the task started, such as the processes of a verifier."""
        ...


def grade_rollouts(task: Task, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Grade]:
    """A grade for every rollout, in order; rollout i answers prompt i.

    What was cut off before its end, or failed in the engine, is worth 0 whatever it says: the task does not see it.
    """
    finished = [i for i, rollout in enumerate(rollouts) if rollout.finish == "stop"]
    cut_off = ("length", "canceled")
    grades = [Grade(0.0, "truncated" if rollout.finish in cut_off else "error", None) for rollout in rollouts]
    graded = task.grade_all([prompts[i] for i in finished], [rollouts[i].text for i in finished])
    for i, grade in zip(finished, graded, strict=True):
        grades[i] = grade
    return grades


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template by its checksum, or "none" where prompts are taken as they are."""
    template = tokenizer.chat_template
    return f"chat template {checksum([str(template)])}" if template else "none"


def checksum(texts: Iterable[str]) -> str:
    """16 hexadecimal digits over texts in order; where one ends and the next begins counts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
