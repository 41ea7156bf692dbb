"""How the loop talks to a rollout engine, wherever that engine runs.

Commands are carried out in the order in which they are given. `broadcast`, `submit` and `admit` return at once
(or as soon as the backend can); `collect` waits for the oldest request that was not collected yet. Groups that
were admitted are generated between the commands, a token at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from steadyrl.pipeline.group_stream import Arrival, Stragglers
from steadyrl.types import GenerationRequest, Rollout


@dataclass(frozen=True)
class EngineSpec:
    """All that is needed to build the engine, here or in another process."""

    model_path: str
    dtype: str  # "bfloat16" | "float32"
    max_sequences: int
    records_routing: bool
    threads: int
    start_timeout_s: float
    generate_timeout_s: float
    cache_on_update: Literal["keep", "rebuild"]
    stragglers: Stragglers


@dataclass(frozen=True)
class Generated:
    """The answer to one request. Times are those of the engine, on `time.monotonic`."""

    rollouts: list[Rollout]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Loaded:
    """A finished broadcast."""

    version: int
    start_s: float
    end_s: float


class Backend(Protocol):
    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Bring the weights into the engine before any request submitted later."""
        ...

    def submit(self, request: GenerationRequest) -> None: ...

    def collect(self) -> Generated:
        """Wait for the oldest request.

        Raises:
            EngineError: the engine died, failed, took too long, or holds other weights than were sent.
        """
        ...

    def admit(self, groups: Sequence[tuple[int, GenerationRequest]]) -> None:
        """Streaming: have the responses to one prompt each, by number, generated as soon as there are places."""
        ...

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        """Streaming: the groups that arrived since the last call; with `wait`, at least one.

        Raises:
            EngineError: as `collect`.
        """
        ...

    def loads(self) -> list[Loaded]:
        """Broadcasts that finished since the last call."""
        ...

    def metrics(self) -> dict[str, float]:
        """What an optimizer step's metrics say about the engine, and the way to it; sums start again."""
        ...

    def close(self) -> None: ...
