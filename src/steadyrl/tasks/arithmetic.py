"""Running sums with visible steps: "3+8+2=" is answered by "11,13".

The numbers come from the seed, so every prompt can be found again from its position. A problem is in
the test split or in the training split by a hash of its text alone: the two are disjoint whatever the
seed, and the base model never saw the test split either.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from steadyrl.errors import ConfigError
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.base import Grade, Split, template_name
from steadyrl.tasks.render import render_prompt
from steadyrl.types import Prompt

TEST_SHARE = 10  # one problem in so many is held out
MAX_DRAWS = 20_000  # without a fitting problem, before the task is called too small
TEST_SEED = 20_260_722  # the held-out set is the same for every run


class Arithmetic:
    """See the module's first lines."""

    grader = "the number after the last comma"

    def __init__(self, config: ArithmeticTask, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.config = config
        self.template = template_name(tokenizer)
        self.test_size: int | None = None
        self.data: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._seed = seed
        self._test: list[list[int]] = []
        self._met: set[tuple[int, ...]] = set()
        self._test_draws = self._draws(random.Random(TEST_SEED))

    def terms(self, split: Split, position: int) -> list[int]:
        """The summands of the problem at a position."""
        if split == "train":
            draws = self._draws(random.Random(f"{self._seed}/train/{position}"))
            for terms in islice(draws, MAX_DRAWS):
                if split_of(terms) == "train":
                    return terms
            raise ConfigError(f"{self._described()} has no training problems: raise them")
        while len(self._test) <= position:
            self._test.append(self._next_held_out())
        return self._test[position]

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return [self._prompt(split, position) for position in range(start, start + count)]

    def grade_all(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Grade]:
        """1 for the exact sum after the last comma, else 0."""
        return [_grade(prompt.answer, response) for prompt, response in zip(prompts, responses, strict=True)]

    def close(self) -> None:
        """Nothing to release."""

    def _prompt(self, split: Split, position: int) -> Prompt:
        terms = self.terms(split, position)
        text = question(terms)
        return Prompt(f"{split}/{position}", render_prompt(self._tokenizer, text), text, str(sum(terms)))

    def _draws(self, generator: random.Random) -> Iterator[list[int]]:
        most, least = self.config.terms, self.config.min_terms
        while True:
            terms = most if least is None else generator.randint(least, most)
            yield [generator.randint(1, self.config.max_term) for _ in range(terms)]

    def _next_held_out(self) -> list[int]:
        """The next problem of a fixed stream that is held out and was not met before."""
        for terms in islice(self._test_draws, MAX_DRAWS):
            if split_of(terms) == "test" and tuple(terms) not in self._met:
                self._met.add(tuple(terms))
                return terms
        raise ConfigError(
            f"{self._described()} has only {len(self._test)} held-out problems: raise them, or lower evaluation.prompts"
        )

    def _described(self) -> str:
        return f"task.terms = {self.config.terms} with task.max_term = {self.config.max_term}"


def _grade(answer: str, response: str) -> Grade:
    final = response.rsplit(",", 1)[-1]
    if not re.fullmatch(r"[0-9]+", final):
        return Grade(0.0, "unparsable", None)
    found = final.lstrip("0") or "0"
    return Grade(1.0, "right", found) if found == answer else Grade(0.0, "wrong", found)


def question(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def steps(terms: list[int]) -> list[int]:
    """The partial sums that a full answer shows; the last one is the answer."""
    return list(accumulate(terms))[1:]


def split_of(terms: list[int]) -> Split:
    digest = hashlib.blake2s(question(terms).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"
