"""A rollout server, and what it is given to do, as its pool sees them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from steadyrl.engines.http_client import JsonClient
from steadyrl.types import GenerationRequest, Prompt


@dataclass(frozen=True)
class Patience:
    """How long what may take; seconds."""

    request_s: float  # one answer to one prompt
    weights_s: float  # pausing, or loading
    start_s: float  # until every server answers for the first time
    stall_s: float  # without a token from a server that has requests
    recovery_s: float  # without any server that is ready
    health_s: float = 10.0
    poll_s: float = 1.0
    attempts: int = 3  # at one prompt, and two at each loading of weights
    strikes: int = 2  # health checks missed in a row


@dataclass(frozen=True)
class Weights:
    """A checkpoint that the servers read, and what they are to call it."""

    folder: Path
    tag: str


@dataclass(eq=False)
class Server:
    """A server, as the pool sees it."""

    url: str
    client: JsonClient
    state: Literal["ready", "loading", "out"] = "out"
    why: str = "it has not answered yet"
    software: str = ""
    holds: Weights | None = None  # what was verified last
    verified: set[str] = field(default_factory=set)  # the tags of all that was
    responses: int = 0  # that it is working on
    work: set[asyncio.Task[Any]] = field(default_factory=set)  # that ends when the server is given up
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one conversation about weights at a time


@dataclass(eq=False)
class Job:
    """The responses to one prompt, on their way."""

    request_id: str
    prompt: Prompt
    request: GenerationRequest
    server: Server | None = None  # that works on it
    task: asyncio.Task[Any] | None = None
    started_s: float | None = None  # on time.monotonic, since it has a server
    is_canceled: bool = False
