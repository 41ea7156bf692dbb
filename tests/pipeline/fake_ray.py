"""Ray without processes: actors live here, and a call is carried out when it is made.

A method that raises `Died` ends its actor: this call, those that wait and those that come raise what Ray raises then.
A method that returns a `Later` answers when that has a value; `Later()` never has.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """A failed call; `cause` is what the method raised."""

    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        if cause is not None:
            self.cause = cause


class RayActorError(RayError): ...


class ObjectLostError(RayError): ...


class GetTimeoutError(RayError): ...


class Died(Exception): ...


@dataclass
class Later:
    value: Callable[[], Any] = lambda: None


class Ref:
    def __init__(self, actor: FakeActor | None, value: Any) -> None:
        self.actor, self.value = actor, value

    @property
    def is_ready(self) -> bool:
        if isinstance(self.value, Later):
            if (value := self.value.value()) is not None:
                self.value = value
            elif self.actor is not None and self.actor.death:
                self.value = RayActorError(self.actor.death)
        return not isinstance(self.value, Later)


class FakeActor:
    def __init__(self, instance: Any) -> None:
        self.instance, self.death = instance, ""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given, **named: self.call(method, given, named))

    def call(self, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Ref:
        if self.death:
            return Ref(self, RayActorError(self.death))
        given = tuple(pickle.loads(pickle.dumps(one.value if isinstance(one, Ref) else one)) for one in given)
        try:
            return Ref(self, getattr(self.instance, method)(*given, **named))
        except Died as error:
            self.death = f"the actor died: {error}"
            return Ref(self, RayActorError(self.death))
        except Exception as error:
            return Ref(self, RayError(f"Traceback ... {error!r}", error))


class FakeRay:
    exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        ObjectLostError=ObjectLostError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.killed: list[FakeActor] = []

    def remote(self, kind: type) -> Any:
        def make(*given: Any) -> FakeActor:
            self.actors.append(FakeActor(kind(*given)))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def put(self, value: Any) -> Ref:
        return Ref(None, value)

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if not ref.is_ready:
            raise GetTimeoutError("not in time")
        if isinstance(ref.value, RayError):
            raise ref.value
        return ref.value

    def wait(self, refs: list[Ref], timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.is_ready][:1]
        return ready, [ref for ref in refs if ref not in ready]

    def kill(self, actor: FakeActor) -> None:
        actor.death = actor.death or "killed"
        self.killed.append(actor)


class NoPlace:
    def options(self) -> dict[str, Any]:
        return {}
