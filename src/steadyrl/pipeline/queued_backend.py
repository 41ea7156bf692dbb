"""A backend whose engine takes commands from one queue and answers into another: what is on its way, what has come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from steadyrl.pipeline.backend import Generated, Loaded
from steadyrl.pipeline.group_stream import Arrival
from steadyrl.types import GenerationRequest


class QueuedBackend(ABC):
    """All of a `Backend` but `broadcast` and `close`, on top of three methods of the subclass."""

    engine_name = "the engine"  # in errors

    def __init__(self) -> None:
        self._finished: deque[Generated] = deque()
        self._arrivals: list[Arrival] = []
        self._loads: list[Loaded] = []
        self._waiting = 0  # requests without an answer
        self._admitted = 0  # groups that have not arrived

    @abstractmethod
    def _send(self, command: tuple[Any, ...]) -> None: ...

    @abstractmethod
    def _has_answer(self) -> bool:
        """Whether `_receive` would return at once."""
        ...

    @abstractmethod
    def _receive(self, awaited: str) -> None:
        """Wait for one answer of the engine and hand it to `_note`; `awaited` names it if none comes in time."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        self._waiting += 1
        self._send(("generate", request))

    def collect(self) -> Generated:
        assert self._finished or self._waiting, "nothing was submitted"
        while not self._finished:
            self._receive(f"{self.engine_name} to finish a generation")
        return self._finished.popleft()

    def admit(self, groups: Sequence[tuple[int, GenerationRequest]]) -> None:
        self._admitted += len(groups)
        self._send(("admit", list(groups)))  # one message: those that come together start together

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        while self._has_answer():
            self._receive(self.engine_name)
        while wait and not self._arrivals:
            assert self._admitted, "nothing was admitted"
            self._receive(f"{self.engine_name} to finish a group")
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def metrics(self) -> dict[str, float]:
        return {}

    def _note(self, answer: Generated | list[Arrival] | Loaded) -> None:
        if isinstance(answer, Generated):
            self._waiting -= 1
            self._finished.append(answer)
        elif isinstance(answer, Loaded):
            self._loads.append(answer)
        else:
            self._admitted -= len(answer)
            self._arrivals += answer
