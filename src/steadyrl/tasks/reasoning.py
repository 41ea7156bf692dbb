"""Procedural reasoning tasks of the reasoning-gym package, graded by that package's own scorers."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from steadyrl.errors import ConfigError
from steadyrl.task_config import ReasoningTask
from steadyrl.tasks.answers import last_number
from steadyrl.tasks.base import Grade, Split, template_name
from steadyrl.tasks.render import render_prompt
from steadyrl.types import Prompt

CHUNK = 512  # entries per reasoning-gym data set; entry i of a set with seed s is drawn from s + i
HELD_OUT = 8  # one question in 8 belongs to the test split
TEST_SEED = 20_260_722  # the held-out set is the same for every run
PATIENCE = 10_000  # entries in a row without a new question of a split, after which there are no more


class ReasoningGymTask:
    """Questions with one number as their answer; a response is right if its last number is that number.

    Whether a question is held out depends on its text alone, so no test question is ever trained on,
    for any seed, and the size of the test set may change without touching the training prompts.
    """

    def __init__(self, config: ReasoningTask, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """
        Raises:
            ConfigError: if reasoning-gym is not installed, knows no such data set or option, or if the
                answers of the data set are not numbers.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._gym = _import_reasoning_gym()
        self.grader = f"the last number, by reasoning-gym {version('reasoning-gym')}"
        self.template = template_name(tokenizer)
        self.test_size: int | None = None
        self.data: dict[str, Any] = {}
        self._streams: dict[Split, _Stream] = {
            "train": _Stream(self._create_chunk, seed, "train"),
            "test": _Stream(self._create_chunk, TEST_SEED, "test"),
        }
        self._scorer = self._create_chunk(0)
        self._check_answers(self._scorer[0])

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """See `Task.prompts`. Test questions are distinct; training questions may come again.

        Raises:
            ConfigError: if there are fewer different test questions than asked for.
        """
        return [self._prompt(split, position) for position in range(start, start + count)]

    def grade_all(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Grade]:
        """Reward 1 for the right number, else 0: the scorer's partial credit for near misses is not given."""
        return [self._grade(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def close(self) -> None:
        """Nothing to release."""

    def _grade(self, prompt: Prompt, response: str) -> Grade:
        answer = last_number(response)
        if answer is None:
            return Grade(0.0, "unparsable", None)
        is_right = self._is_right(answer, prompt.meta["entry"])
        return Grade(1.0, "right", answer) if is_right else Grade(0.0, "wrong", answer)

    def _is_right(self, answer: str, entry: dict[str, Any]) -> bool:
        return self._scorer.score_answer(answer=answer, entry=entry) >= 1.0

    def _create_chunk(self, seed: int) -> Any:
        name, options = self._config.dataset, self._config.options
        if {"seed", "size"} & options.keys():
            raise ConfigError("task.options cannot hold seed or size: the seed of the run decides the questions")
        if name not in self._gym.factory.DATASETS:
            raise ConfigError(f"reasoning-gym has no data set {name!r}: set task.dataset to one such as chain_sum")
        try:
            return self._gym.create_dataset(name, seed=seed, size=CHUNK, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym refuses the task.options for {name}, change them: {error}") from None

    def _check_answers(self, entry: dict[str, Any]) -> None:
        answer = last_number(str(entry["answer"]))
        if answer is None or not self._is_right(answer, entry):
            raise ConfigError(
                f"the answers of {self._config.dataset} are not single numbers (one is {entry['answer']!r}): "
                "set task.dataset to one such as chain_sum"
            )

    def _prompt(self, split: Split, position: int) -> Prompt:
        entry = self._streams[split].entry(position)
        text = "\n".join(part for part in (self._config.instruction, entry["question"]) if part)
        return Prompt(
            prompt_id=f"{split}/{position}",
            token_ids=render_prompt(self._tokenizer, text),
            text=text,
            answer=str(entry["answer"]),
            meta={"entry": entry},
        )


class _Stream:
    """The entries of one split by position, found by reading the endless list of a seed in order."""

    def __init__(self, create_chunk: Callable[[int], Any], seed: int, split: Split) -> None:
        self._create_chunk = create_chunk
        self._split = split
        # hashed, since neighbouring seeds would give the same entries shifted by one
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) // 2
        self._chunk_number, self._chunk = 0, create_chunk(self._seed)
        self._indices: list[int] = []  # position -> index in the endless list
        self._test_questions: set[str] = set()
        self._read = 0

    def entry(self, position: int) -> dict[str, Any]:
        while len(self._indices) <= position:
            self._find_next()
        return self._at(self._indices[position])

    def _find_next(self) -> None:
        for index in range(self._read, self._read + PATIENCE):
            question = self._at(index)["question"]
            if _split_of(question) == self._split and question not in self._test_questions:
                if self._split == "test":
                    self._test_questions.add(question)
                self._indices.append(index)
                self._read = index + 1
                return
        raise ConfigError(
            f"these task.options give only {len(self._indices)} different {self._split} questions: "
            "set evaluation.prompts to that or less, or widen task.options"
        )

    def _at(self, index: int) -> dict[str, Any]:
        number, offset = divmod(index, CHUNK)
        if number != self._chunk_number:
            self._chunk_number, self._chunk = number, self._create_chunk(self._seed + number * CHUNK)
        return self._chunk[offset]


def _split_of(question: str) -> Split:
    return "test" if zlib.crc32(question.encode()) % HELD_OUT == 0 else "train"


def _import_reasoning_gym() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")  # heavy, and wanted by this task alone
    except ImportError:
        raise ConfigError('task.name = "reasoning_gym" needs a package: pip install "steadyrl[real]"') from None
