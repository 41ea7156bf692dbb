"""The engine of a simulation: commands in their order, and decode steps between them. Times are simulated seconds.

A decode step gives one token to every running response and takes `decode_step_s + decode_sequence_s * running`; several
engines share the responses evenly and step together. A response that is finished leaves, and the one that has waited
longest takes its place in the next step, as in engines/decoder.py. Nothing changes between two such events, so the
clock jumps from one to the next.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from steadyrl.planning.lengths import GroupLengths
from steadyrl.planning.rates import Rates

Phase = Literal["generate", "evaluate"]


@dataclass
class Group:
    """The responses to one prompt on their way through the engine."""

    number: int
    lengths: GroupLengths
    starts: list[int] = field(default_factory=list)  # decode steps that were over when each response got its place
    left: int = 0  # responses that are not finished


@dataclass
class Command:
    """What the trainer asked for; `end_s` is infinite until the engine has done it."""

    sent_s: float
    kind: Literal["load", "admit", "generate", "evaluate"]
    groups: Sequence[Group] = ()
    version: int = -1  # of a load
    end_s: float = math.inf


@dataclass(frozen=True)
class Arrival:
    """A group of a stream that is finished."""

    number: int
    at_s: float  # when the trainer has it


class EngineClock:
    """Works off commands. It is asked to go on to a moment, to a command's end, or to the next arrival.

    Args:
        places: responses that may run at a time, in all engines.
        load_s: seconds that taking over weights takes.
        transfer_s: seconds from the end of a group of a stream until the trainer has it.
    """

    def __init__(self, rates: Rates, *, engines: int, places: int, load_s: float, transfer_s: float) -> None:
        self.now_s = 0.0
        self.busy_s = 0.0
        self.steps = 0  # decode steps that are over
        self.loads: list[tuple[int, int]] = []  # decode steps that were over, and the version that came then
        self._rates = rates
        self._engines = engines
        self._places = places
        self._load_s = load_s
        self._transfer_s = transfer_s
        self._commands: deque[Command] = deque()
        self._blocking: Command | None = None  # a request whose groups have to be finished before the next command
        self._unfinished = 0  # groups of the blocking request
        self._blocked: list[int] = []  # groups of the stream that were finished meanwhile
        self._waiting: deque[tuple[Group, int, bool]] = deque()  # group, tokens, whether it is of a request
        self._running: list[tuple[int, int, Group, bool]] = []  # a heap by the step that finishes it
        self._order = 0
        self._arrivals: deque[Arrival] = deque()

    # ---- the trainer's side ----

    def send(self, command: Command) -> Command:
        """Queue a command; times of commands never go back."""
        self._commands.append(command)
        return command

    def advance(self, until_s: float) -> None:
        """Work until this moment, or a little longer: a decode step is not interrupted."""
        while self.now_s < until_s and self._work(until_s):
            pass

    def finish(self, command: Command) -> float:
        """Work until a command is done; the moment when it was."""
        while math.isinf(command.end_s):
            went_on = self._work(math.inf)
            assert went_on, "a command that was not sent"
        return command.end_s

    def arrived(self, until_s: float) -> list[Arrival]:
        """The groups that the trainer has at this moment and did not ask for yet."""
        self.advance(until_s)
        found = []
        while self._arrivals and self._arrivals[0].at_s <= until_s:
            found.append(self._arrivals.popleft())
        return found

    def next_arrival(self) -> float:
        """Work until a group is finished; the moment when the trainer has it. It stays to be asked for."""
        while not self._arrivals:
            went_on = self._work(math.inf)
            assert went_on, "nothing was admitted"
        return self._arrivals[0].at_s

    # ---- work ----

    def _work(self, until_s: float) -> bool:
        """One command or one stretch of decode steps; false if there is nothing to do before `until_s`."""
        is_idle = not self._running and not self._waiting
        due = self._commands[0].sent_s if self._commands and self._blocking is None else math.inf
        if due <= self.now_s or (is_idle and due <= until_s and not math.isinf(due)):
            self.now_s = max(self.now_s, due)
            self._obey(self._commands.popleft())
            return True
        if is_idle:
            return False
        self._decode(min(due, until_s))
        return True

    def _obey(self, command: Command) -> None:
        if command.kind == "load":
            self._spend(self._load_s)
            self.loads.append((self.steps, command.version))
            command.end_s = self.now_s
            return
        is_request = command.kind != "admit"
        for group in command.groups:
            group.left = len(group.lengths.responses)
            self._waiting.extend((group, int(tokens), is_request) for tokens in group.lengths.responses)
        if is_request:
            self._blocking, self._unfinished = command, len(command.groups)
        else:
            command.end_s = self.now_s

    def _decode(self, until_s: float) -> None:
        """Steps until a response is finished, or until this moment is over; at least one."""
        prefill_s = self._admit()
        running = len(self._running)
        step_s = self._rates.decode_step_s + self._rates.decode_sequence_s * running / self._engines
        self._spend(prefill_s)
        steps = self._running[0][0] - self.steps
        if not math.isinf(until_s) and step_s > 0:
            steps = min(steps, max(1, math.ceil((until_s - self.now_s) / step_s)))
        self._spend(steps * step_s)
        self.steps += steps
        while self._running and self._running[0][0] == self.steps:
            _, _, group, is_request = heapq.heappop(self._running)
            group.left -= 1
            if group.left == 0:
                self._complete(group, is_request)

    def _admit(self) -> float:
        """Give the places that are free to those that wait; seconds that their prompts take."""
        tokens = 0
        while self._waiting and len(self._running) < self._places:
            group, length, is_request = self._waiting.popleft()
            if not group.starts:
                tokens += group.lengths.prompt
            group.starts.append(self.steps)
            heapq.heappush(self._running, (self.steps + length, self._order, group, is_request))
            self._order += 1
        return tokens * self._rates.prefill_token_s / self._engines

    def _complete(self, group: Group, is_request: bool) -> None:
        if not is_request and self._blocking is None:
            self._hand_out(group.number)
        elif not is_request:
            self._blocked.append(group.number)  # handed out between commands
        else:
            assert self._blocking is not None
            self._unfinished -= 1
            if self._unfinished == 0:
                self._blocking.end_s, self._blocking = self.now_s, None
                for number in self._blocked:
                    self._hand_out(number)
                self._blocked = []

    def _hand_out(self, number: int) -> None:
        self._arrivals.append(Arrival(number, self.now_s + self._transfer_s))

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds


def versions_of(group: Group, loads: Sequence[tuple[int, int]]) -> dict[int, int]:
    """How many of a finished group's tokens each version sampled: a load counts for the steps after it."""
    counts: dict[int, int] = {}
    for start, tokens in zip(group.starts, group.lengths.responses.tolist(), strict=True):
        end = start + tokens
        first = bisect.bisect_right(loads, start, key=lambda load: load[0]) - 1
        for index in range(first, len(loads)):
            since, version = loads[index]
            if since >= end:
                break
            until = loads[index + 1][0] if index + 1 < len(loads) else end
            sampled = min(end, until) - max(start, since)
            if sampled > 0:
                counts[version] = counts.get(version, 0) + sampled
    return counts


def decode_steps(lengths: Sequence[int], places: int) -> int:
    """Steps in which responses of these lengths are decoded, that many at a time, in their order."""
    ends: list[int] = []
    for index, tokens in enumerate(lengths):
        heapq.heappush(ends, tokens if index < places else heapq.heappop(ends) + tokens)
    return max(ends)
