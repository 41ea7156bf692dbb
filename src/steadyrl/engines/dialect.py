"""What differs between serving engines: their routes, and how they say what they did.

`remote_engine.py` and `server_pool.py` speak to every server through a `Dialect`; a dialect only translates. It keeps
no state but the names of running requests, checks nothing that it need not know for the translation, and passes on
numbers as the server gave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from steadyrl.types import GenerationRequest, Prompt

Pause = Literal["keep", "wait"]  # what becomes of running responses while weights are loaded: held, or waited for
# of which distribution a server reports log-probabilities: of the model, after the temperature, or as it was sampled
LogprobsMode = Literal["raw", "tempered", "processed"]


class ServerFault(Exception):
    """A server did not do what was asked: it is gone, late, answers with an error, or says something impossible.

    `refused`: it is well, and will not do this for anybody (status 400 or 422).
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class HttpClient(Protocol):
    """Requests to one server. Both return the JSON object of the answer, or its text under the key "text".

    Raises:
        ServerFault: no answer within `timeout_s`, or none with a status below 400.
    """

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]: ...

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True)
class VersionSpan:
    """The response tokens `start` to `end` - 1 were sampled by weights that are called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """One response, as a server gave it; n tokens."""

    token_ids: list[int]
    logp: list[float]  # of the sampled tokens, NaN where the server gave none
    finish: Literal["stop", "length", "canceled"]
    spans: list[VersionSpan]
    routed_experts: NDArray[Any] | None = None  # [prompt + n - 1, L, K]
    support: list[list[int]] | None = None  # n lists: what top-p and top-k left to draw from


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself; None where it does not."""

    software: str  # name and version
    model: str
    weight_version: str
    context_length: int | None  # tokens
    logprobs: LogprobsMode | None
    dtype: str | None
    returns_routed_experts: bool
    returns_support: bool


class Dialect(Protocol):
    """One kind of server. Every method may raise ServerFault."""

    name: str

    async def info(self, client: HttpClient) -> ServerInfo: ...

    async def progress(self, client: HttpClient, *, timeout_s: float) -> float | None:
        """Tokens generated so far by a server that is well; None where it does not count them."""
        ...

    async def generate(
        self,
        client: HttpClient,
        request_id: str,
        prompt: Prompt,
        request: GenerationRequest,
        *,
        weights: str,
        routed_experts: bool,
        timeout_s: float,
    ) -> list[Completion]:
        """`request.samples_per_prompt` responses to one of its prompts.

        Args:
            weights: what the server's weights are called; nothing that other weights computed may be used again.
            routed_experts: ask for them.
        """
        ...

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """End the responses of a `generate` that is running; it returns what there is of them, as "canceled"."""
        ...

    async def pause(self, client: HttpClient, mode: Pause, *, timeout_s: float) -> None: ...

    async def load(self, client: HttpClient, folder: Path, version: str, *, timeout_s: float) -> None:
        """Have a paused server read a Hugging Face checkpoint, forget prefixes, and call its weights `version`."""
        ...

    async def resume(self, client: HttpClient) -> None: ...

    async def tokenize(self, client: HttpClient, text: str, *, timeout_s: float) -> Sequence[int] | None:
        """Token ids of a text without special tokens; None where the server cannot say."""
        ...
