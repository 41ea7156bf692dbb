"""What the pipeline asks of a rollout engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from steadyrl.errors import EngineError
from steadyrl.types import GenerationRequest, Rollout


class Engine(Protocol):
    """Token ids in, token ids and the log-probabilities they were sampled with out."""

    version: int  # of the weights it generates with

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Take over the weights and return `weights_checksum` of what is now in the model."""
        ...

    def generate(self, request: GenerationRequest) -> list[Rollout]:
        """Responses in the order of the request: prompt 0's samples, then prompt 1's, ...

        A prompt that leaves no room for its response is answered with `finish="too_long"` and no token where
        `request.long_prompts` is "drop".

        Raises:
            EngineError: there is such a prompt, and they are refused.
        """
        ...

    def close(self) -> None: ...


class StreamingEngine(Engine, Protocol):
    """An engine whose responses can be had one by one, and whose weights may change while they run.

    `load_weights` between two steps is an in-flight update: running responses go on under the new weights, and
    each token keeps the version that sampled it.
    """

    @property
    def num_running(self) -> int:
        """Responses that get a token in every step."""
        ...

    @property
    def num_waiting(self) -> int:
        """Responses that wait for a place."""
        ...

    def submit(self, request: GenerationRequest) -> list[int]:
        """Queue the responses of a request behind the others; returns an id for each, in the request's order.

        The same request draws the same random numbers whatever else is running. Raises as `generate` does.
        """
        ...

    def step(self) -> dict[int, Rollout]:
        """Admit what waits while there are places, and sample one token for each running response.

        Returns:
            The rollouts that were finished since the last call, by id.
        """
        ...

    def cancel(self, sequence_id: int) -> Rollout:
        """End a response that runs or waits; `finish` is "canceled" and the tokens are those sampled so far."""
        ...

    def overdue(self, *, tokens: int | None = None, seconds: float | None = None) -> list[int]:
        """Running responses that have so many tokens, or have had their place for so long: for `cancel`.

        Tokens are decode steps, and repeatable; seconds depend on the machine.
        """
        ...


class ServedEngine(StreamingEngine, Protocol):
    """An engine on servers, which may fail and be replaced while it works."""

    def metrics(self) -> dict[str, float]:
        """What happened on the servers since they were connected; may be called from another thread."""
        ...


def assign_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Copy weights into a model, in its dtype; `weights_checksum` of what it then holds.

    Raises:
        EngineError: names or shapes that do not map one to one; the model is as it was.
    """
    own = dict(model.named_parameters())
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise EngineError(f"the broadcast and the engine's model disagree about {len(odd)} weights, first {odd[0]}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            arrived, expected = tuple(weights[name].shape), tuple(parameter.shape)
            raise EngineError(f"{name} arrives with shape {arrived}; the engine's model has {expected}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return weights_checksum(own)


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """CRC-32 over names, dtypes, shapes and bytes: equal weights, equal checksum, whatever the order."""
    crc = 0
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
