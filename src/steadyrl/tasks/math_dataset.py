"""Problems from data sets, graded by the verifier.

The training split never ends: epoch after epoch it holds every problem once, each epoch in an order of its
own. Which problem stands at a position is a function of the data, the seed and the position alone, so a
resumed run goes on with the very next prompt, also in the middle and at the end of an epoch. The test split
holds every problem of the test sources once, in the order of the sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerBase

from steadyrl.errors import ConfigError
from steadyrl.task_config import MathDatasetTask
from steadyrl.tasks.answers import clean
from steadyrl.tasks.base import Grade, Split, checksum, template_name
from steadyrl.tasks.problems import Problem, load_problems
from steadyrl.tasks.render import render_prompt
from steadyrl.tasks.verifier import Answer, Verifier
from steadyrl.tasks.verifier_policy import Policy, read_policy
from steadyrl.types import Prompt


class MathDataset:
    """A `Task`; see the module's first lines. It holds the verifier's processes until `close`."""

    def __init__(self, config: MathDatasetTask, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """
        Raises:
            ConfigError: data that cannot be read, bad rows, or a verifier that cannot work.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._epochs: dict[int, list[int]] = {}
        policy = read_policy(config.verifier.policy) if config.verifier.policy else Policy()
        skip = config.bad_rows == "skip"
        test = load_problems(config.test, "test", skip_bad_rows=skip)
        train = load_problems(config.train, "train", skip_bad_rows=skip, leave_out=frozenset(test.keys()))
        self._problems: dict[Split, list[Problem]] = {"train": train.problems, "test": test.problems}
        self.test_size: int | None = len(test.problems)
        self.data: dict[str, Any] = {"train": train.as_json(), "test": test.as_json()}
        self.template = template_name(tokenizer)
        self.grader = grader_name(policy)
        settings = config.verifier
        self._verifier = Verifier(policy, settings.workers, settings.timeout_s, settings.memory_mb << 20)

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """See `Task.prompts`.

        Raises:
            ConfigError: the split has no problems, or the test split not so many.
        """
        problems = self._problems[split]
        if not problems:
            raise ConfigError(f'task.{split} names no problems: set it to a list of sources, such as ["gsm8k"]')
        if split == "test" and start + count > len(problems):
            raise ConfigError(
                f"the test sources hold {len(problems)} problems: set evaluation.prompts to that, or to 0 for all"
            )
        return [self._prompt(split, position) for position in range(start, start + count)]

    def grade_all(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Grade]:
        """See `Task.grade_all`; the answers are judged side by side."""
        answers = [
            Answer(gold=prompt.answer, response=response) for prompt, response in zip(prompts, responses, strict=True)
        ]
        return [
            Grade(verdict.reward, verdict.status, None if verdict.extracted is None else clean(verdict.extracted))
            for verdict in self._verifier.grade(answers)
        ]

    def close(self) -> None:
        """End the verifier's processes."""
        self._verifier.close()

    def _prompt(self, split: Split, position: int) -> Prompt:
        problem = self._problem(split, position)
        text = f"{problem.text}\n\n{self._config.instruction}" if self._config.instruction else problem.text
        return Prompt(
            prompt_id=f"{split}/{position}",
            token_ids=render_prompt(self._tokenizer, text),
            text=text,
            answer=problem.answer,
            meta={"source": problem.source, "place": problem.place},
        )

    def _problem(self, split: Split, position: int) -> Problem:
        problems = self._problems[split]
        if split == "test":
            return problems[position]
        epoch, offset = divmod(position, len(problems))
        if epoch not in self._epochs:
            for old in sorted(self._epochs)[:-1]:  # a batch may reach over the end of an epoch
                del self._epochs[old]
            self._epochs[epoch] = epoch_order(len(problems), self._seed, epoch)
        return problems[self._epochs[epoch][offset]]


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(size). By hashes, not a random generator, whose stream a new version may change."""
    return sorted(range(size), key=lambda i: hashlib.blake2b(f"{seed}/{epoch}/{i}".encode(), digest_size=16).digest())


def grader_name(policy: Policy) -> str:
    """The verifier with what decides its verdicts: its version, math-verify's, and its policy by checksum."""
    choices = checksum([json.dumps(asdict(policy), sort_keys=True)])
    return f"steadyrl {version('steadyrl')} with math-verify {version('math-verify')}, policy {choices}"
