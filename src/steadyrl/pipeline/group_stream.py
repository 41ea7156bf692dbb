"""The engine's side of streaming: groups go in, and come out whole, one by one.

Runs beside the engine, in its process. All responses to a prompt are admitted together and handed over together,
because their advantages need each other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from steadyrl.engines.base import StreamingEngine
from steadyrl.types import GenerationRequest, Rollout


@dataclass(frozen=True)
class Stragglers:
    """What becomes of a group with a response that has run for too long."""

    timeout_s: float  # since the response got its place; 0 = never
    are_kept: bool  # with the tokens they have; else the whole group is given up


@dataclass(frozen=True)
class Arrival:
    """A group that is finished, or was given up."""

    number: int
    rollouts: list[Rollout]  # empty where the group was given up
    start_s: float  # of the engine's work since the last arrival, on `time.monotonic`
    end_s: float


@dataclass
class _Group:
    ids: list[int]  # in the request's order
    finished: dict[int, Rollout] = field(default_factory=dict)


class GroupStream:
    """A streaming engine, seen as groups."""

    def __init__(self, engine: StreamingEngine, stragglers: Stragglers) -> None:
        self._engine = engine
        self._stragglers = stragglers
        self._groups: dict[int, _Group] = {}  # by number
        self._group_of: dict[int, int] = {}  # response -> number
        self._busy_since_s: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self._groups

    def admit(self, number: int, request: GenerationRequest) -> None:
        """Queue the group of a request with one prompt."""
        assert len(request.prompts) == 1, "a group has one prompt"
        ids = self._engine.submit(request)
        self._groups[number] = _Group(ids)
        self._group_of |= dict.fromkeys(ids, number)

    def begin_work(self) -> None:
        """What the engine did up to now was something else."""
        self._busy_since_s = time.monotonic()

    def step(self) -> list[Arrival]:
        """One token for every running response; the groups that this finished or that ran out of time."""
        if self._busy_since_s is None:
            self.begin_work()
        for response, rollout in self._engine.step().items():
            self._settle(response, rollout)
        given_up = self._end_stragglers() if self._stragglers.timeout_s else []
        whole = [number for number, group in self._groups.items() if len(group.finished) == len(group.ids)]
        return [self._arrive(number, given_up=False) for number in whole] + given_up

    def _settle(self, response: int, rollout: Rollout) -> None:
        number = self._group_of.pop(response)
        self._groups[number].finished[response] = rollout

    def _end_stragglers(self) -> list[Arrival]:
        given_up = []
        for response in self._engine.overdue(seconds=self._stragglers.timeout_s):
            if response not in self._group_of:
                continue  # went with its group
            if self._stragglers.are_kept:
                self._settle(response, self._engine.cancel(response))
                continue
            number = self._group_of[response]
            for other in self._groups[number].ids:
                if self._group_of.pop(other, None) is not None:
                    self._engine.cancel(other)
            given_up.append(self._arrive(number, given_up=True))
        return given_up

    def _arrive(self, number: int, *, given_up: bool) -> Arrival:
        group = self._groups.pop(number)
        assert self._busy_since_s is not None
        start, end = self._busy_since_s, time.monotonic()
        self._busy_since_s = end if self._groups else None
        return Arrival(number, [] if given_up else [group.finished[i] for i in group.ids], start, end)
