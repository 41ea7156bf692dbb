"""Running sums with visible steps: "3+8+2=" is answered by "11,13".

The numbers come from the seed, so every prompt can be found again from its position. A problem is in
the test split or in the training split by a hash of its text alone: the two are disjoint whatever the
seed, and the base model never saw the test split either.
"""

from __future__ import annotations

import hashlib
import random
import re
from itertools import accumulate, count

from transformers import PreTrainedTokenizerBase

from steadyrl.config import ArithmeticTask
from steadyrl.errors import ConfigError
from steadyrl.tasks.base import Split
from steadyrl.tasks.render import render_prompt
from steadyrl.types import Prompt, Rollout, Status

TEST_SHARE = 10  # one problem in so many is held out
TEST_SEED = 20_260_722  # the held-out set is the same for every run


class Arithmetic:
    """See the module's first lines."""

    def __init__(self, config: ArithmeticTask, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._test: list[list[int]] = []

    def terms(self, split: Split, position: int) -> list[int]:
        """The summands of the problem at a position."""
        if split == "train":
            generator = random.Random(f"{self._seed}/train/{position}")
            return next(terms for terms in self._draws(generator) if split_of(terms) == "train")
        if position >= len(self._test):
            self._test = self._held_out(position + 1)
        return self._test[position]

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        return [self._prompt(split, position) for position in range(start, start + count)]

    def grade(self, prompt: Prompt, rollout: Rollout) -> tuple[float, Status]:
        """1 for the exact sum after the last comma, else 0; a truncated response is wrong."""
        if rollout.finish == "length":
            return 0.0, "truncated"
        final = rollout.text.rsplit(",", 1)[-1]
        if not re.fullmatch(r"[0-9]+", final):
            return 0.0, "unparsable"
        return (1.0, "right") if int(final) == int(prompt.answer) else (0.0, "wrong")

    def _prompt(self, split: Split, position: int) -> Prompt:
        terms = self.terms(split, position)
        text = question(terms)
        return Prompt(f"{split}/{position}", render_prompt(self._tokenizer, text), text, str(sum(terms)))

    def _draws(self, generator: random.Random):
        while True:
            yield [generator.randint(1, self.config.max_term) for _ in range(self.config.terms)]

    def _held_out(self, size: int) -> list[list[int]]:
        """The first `size` distinct test problems of a fixed stream."""
        generator = random.Random(TEST_SEED)
        chosen: dict[tuple[int, ...], None] = {}
        draws = self._draws(generator)
        for attempt in count():
            if len(chosen) == size:
                return [list(terms) for terms in chosen]
            if attempt > 100 * size + 10_000:
                raise ConfigError(
                    f"task.terms = {self.config.terms} with task.max_term = {self.config.max_term} has fewer than "
                    f"{size} held-out problems: raise them, or lower evaluation.prompts"
                )
            terms = next(draws)
            if split_of(terms) == "test":
                chosen[tuple(terms)] = None
        raise AssertionError("unreachable: count() does not end")


def question(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def steps(terms: list[int]) -> list[int]:
    """The partial sums that a full answer shows; the last one is the answer."""
    return list(accumulate(terms))[1:]


def split_of(terms: list[int]) -> Split:
    digest = hashlib.blake2s(question(terms).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"
