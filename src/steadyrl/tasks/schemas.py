r"""From a row of a published data set to a problem and its answer.

| schema | columns | problem | answer |
| --- | --- | --- | --- |
| DAPO-Math-17k | prompt, reward_model | the user's message, without DAPO's instruction | reward_model.ground_truth |
| Dolci-RL-Zero-Math | prompt or messages, ground_truth | prompt, or the user's message | ground_truth |
| AIME 2024 (Maxwell-Jia) | Problem, Answer | Problem | Answer |
| AIME 2024 (HuggingFaceH4), MATH-500 | problem, answer | problem | answer |
| MATH | problem, solution | problem | the last box of the solution |
| GSM8K | question, answer | question | what follows the last #### |
| CHAMP | _text, _answer | _text | _answer |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from steadyrl.tasks.answers import extract_answer
from steadyrl.tasks.verifier_policy import Policy

Row = Mapping[str, Any]

# what DAPO-Math-17k puts around every problem; a recipe has an instruction of its own
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
BOX_ONLY = Policy(answer_part="whole", without_box="unparsable")
BOX_WITHOUT_BRACES = re.compile(r"\\(?:boxed|fbox)\s+([^{}$\n]+)")


class BadRow(ValueError):
    """A row without a problem or without an answer; the message is the reason."""


@dataclass(frozen=True)
class Schema:
    columns: tuple[str, ...]  # that a file needs to be read so
    read: Callable[[Row], tuple[str, str]]  # problem and answer; raises BadRow


def find_schema(columns: Iterable[str]) -> Schema | None:
    """The published schema that a file with these columns follows, if any."""
    known = set(columns)
    return next((schema for schema in SCHEMAS if known.issuperset(schema.columns)), None)


def named_columns(problem: str, answer: str) -> Schema:
    """A schema of two columns; a dot leads into a nested one: "reward_model.ground_truth"."""
    columns = dict.fromkeys(name.partition(".")[0] for name in (problem, answer))
    return Schema(tuple(columns), lambda row: (_problem(_at(row, problem)), _answer(_at(row, answer))))


def identity(problem: str) -> str:
    """Problems are the same if they differ in white space or in the form of Unicode characters only."""
    return " ".join(unicodedata.normalize("NFC", problem).split())


def _chat(prompt: str, answer: str) -> Schema:
    """A column with a text or chat messages, and one with the answer."""
    columns = (prompt, answer.partition(".")[0])
    return Schema(columns, lambda row: (_problem(_prompt(row, prompt)), _answer(_at(row, answer))))


def _math(row: Row) -> tuple[str, str]:
    solution = _text(_at(row, "solution"), "the solution")
    answer = extract_answer(solution, BOX_ONLY)
    if not answer and (bare := BOX_WITHOUT_BRACES.findall(solution)):
        answer = bare[-1]
    if not answer:
        raise BadRow("the solution has no \\boxed{...}")
    return _problem(_at(row, "problem")), _answer(answer)


def _gsm8k(row: Row) -> tuple[str, str]:
    _, mark, answer = _text(_at(row, "answer"), "the answer").rpartition("####")
    if not mark:
        raise BadRow('the answer has no "####" before its number (name the columns, if these are bare answers)')
    return _problem(_at(row, "question")), _answer(answer)


def _prompt(row: Row, column: str) -> str:
    """The text of a column that holds a text or chat messages, one of them the user's."""
    value = _at(row, column)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise BadRow(f"{column} is neither a text nor a list of messages")
    texts = [message.get("content") for message in value if message.get("role") == "user"]
    if len(texts) != 1 or len(texts) != len(value):
        roles = ", ".join(str(message.get("role")) for message in value) or "none"
        raise BadRow(f"{column} has messages of {roles}; one of the user alone is needed")
    return _text(texts[0], "the message")


def _problem(value: Any) -> str:
    text = _text(value, "the problem").strip()
    if text.startswith(DAPO_BEFORE):
        text = text.removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER)
    text = text.removeprefix("user: ").strip()  # some Dolci sets write the role in front
    if not text:
        raise BadRow("the problem is empty")
    return text


def _answer(value: Any) -> str:
    if isinstance(value, list):
        if len(value) != 1:
            raise BadRow(f"the answer is a list of {len(value)} answers; one is needed")
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    text = _text(value, "the answer").strip()
    if not text:
        raise BadRow("the answer is empty")
    return text


def _text(value: Any, what: str) -> str:
    if value is None:
        raise BadRow(f"{what} is missing")
    if not isinstance(value, str):
        raise BadRow(f"{what} is no text but {type(value).__name__}")
    return value


def _at(row: Row, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise BadRow(f"{path} is missing")
        value = value[name]
    return value


SCHEMAS = (  # in this order: the first whose columns are all there
    _chat("prompt", "reward_model.ground_truth"),
    _chat("prompt", "ground_truth"),
    _chat("messages", "ground_truth"),
    named_columns("Problem", "Answer"),
    named_columns("problem", "answer"),
    Schema(("problem", "solution"), _math),
    Schema(("question", "answer"), _gsm8k),
    named_columns("_text", "_answer"),
)
