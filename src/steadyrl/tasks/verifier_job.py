"""One answer on its way through the verifier, from the response to the verdict."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass

from steadyrl.tasks.answers import extract_answer
from steadyrl.tasks.verifier_policy import Policy
from steadyrl.types import Status

MAX_CHARACTERS = 1000  # of an answer
MAX_LINE_BYTES = 14_000  # of two texts that long: a character takes at most 6 bytes
GOLD = Policy(answer_part="whole", without_box="unparsable")  # how a gold answer in a box is read


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is to be graded. By name only: gold and response are easily swapped."""

    gold: str
    response: str
    truncated: bool = False  # the response was cut off at the token limit: it is not right, whatever it holds


@dataclass(frozen=True)
class Verdict:
    """1 for a right answer, else 0; why; the answer that was found; and what went wrong, if anything."""

    reward: float
    status: Status
    extracted: str | None
    detail: str = ""


class Job:
    """An answer that is found in its response, and the verdict to come.

    Where no comparison is needed the verdict is there at once.
    """

    def __init__(self, answer: Answer, policy: Policy) -> None:
        self.verdict: Future[Verdict] = Future()
        self.attempts = 0  # workers that died with it
        self.line = b""
        found = extract_answer(answer.response, policy)
        gold = extract_answer(answer.gold, GOLD) or answer.gold
        self._extracted = None if found is None else found[:MAX_CHARACTERS]
        if answer.truncated:
            self.settle("truncated", "")
        elif found is None:
            self.settle("unparsable", "it gives no answer")
        elif len(found) > MAX_CHARACTERS:
            self.settle("unparsable", f"it is longer than {MAX_CHARACTERS} characters")
        elif len(gold) > MAX_CHARACTERS:
            self.settle("error", f"the gold answer is longer than {MAX_CHARACTERS} characters")
        else:
            request = json.dumps({"gold": gold, "answer": found}, ensure_ascii=False)
            self.line = request.encode(errors="replace") + b"\n"  # a model can write half a surrogate pair

    def start(self) -> bool:
        """False where nobody waits for it any more, as after a coroutine was cancelled."""
        return self.verdict.running() or self.verdict.set_running_or_notify_cancel()

    def settle(self, status: Status, detail: str) -> None:
        self.verdict.set_result(Verdict(float(status == "right"), status, self._extracted, detail))

    def give_up(self) -> None:
        if self.start():
            self.settle("error", "the verifier was closed")
