"""One response while it is being sampled, and the rollout it becomes."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.types import Finish, GenerationRequest, Prompt, Rollout


@dataclass(eq=False)
class Sequence:
    """What is known about each sampled token, in lists that grow by one entry a token."""

    prompt: Prompt
    group: int  # which prompt of its request
    request: GenerationRequest
    noise: NDArray[np.float64]  # [max_response_tokens], uniform in [0, 1): one number for each token to be drawn
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    # of the prompt [p, L, K], then [1, L, K] for every response token that went through the model
    experts: list[NDArray[Any]] = field(default_factory=list)
    support: list[NDArray[Any]] = field(default_factory=list)
    top_ids: list[NDArray[np.int32]] = field(default_factory=list)
    top_logp: list[NDArray[np.float32]] = field(default_factory=list)
    finish: Finish | None = None  # None: not finished
    text: str = ""  # of a finished response
    admitted_s: float = math.inf  # on time.monotonic: when it got its place

    @property
    def is_restricted(self) -> bool:
        return self.request.top_p < 1 or self.request.top_k > 0

    def input_ids(self) -> NDArray[np.int32]:
        """The tokens that went through the model: all but the last one of the response."""
        return np.concatenate([self.prompt.token_ids, np.asarray(self.tokens[:-1], np.int32)])

    def rollout(self) -> Rollout:
        """The finished response, or what there is of a canceled one."""
        assert self.finish is not None, f"a response to {self.prompt.prompt_id} is not finished"
        prompt_length = len(self.prompt.token_ids)
        loss_mask = np.arange(prompt_length + len(self.tokens)) >= prompt_length
        k = self.request.top_logprobs
        support_ids, support_lengths = self._support(prompt_length) if self.is_restricted else (None, None)
        return Rollout(
            prompt_id=self.prompt.prompt_id,
            group=self.group,
            token_ids=np.concatenate([self.prompt.token_ids, np.asarray(self.tokens, np.int32)]),
            loss_mask=loss_mask,
            behavior_logp=np.concatenate([np.zeros(prompt_length, np.float32), np.asarray(self.logp, np.float32)]),
            versions=np.concatenate([np.full(prompt_length, -1, np.int32), np.asarray(self.versions, np.int32)]),
            routed_experts=self._routed_experts(len(loss_mask) - 1),
            finish=self.finish,
            text=self.text,
            top_ids=_after_prompt(self.top_ids, prompt_length, 0) if k else None,
            top_logp=_after_prompt(self.top_logp, prompt_length, -np.inf) if k else None,
            prompt_text=self.prompt.text,
            support_ids=support_ids,
            support_lengths=support_lengths,
        )

    def _routed_experts(self, num_inputs: int) -> NDArray[Any] | None:
        """[num_inputs, L, K], in the smallest unsigned type that holds the ids; None where nothing was recorded."""
        if not self.experts:
            return None
        # where a response failed, its last token went through the model for a token that was never drawn
        experts = np.concatenate(self.experts)[:num_inputs]
        return experts.astype(np.uint8 if experts.max() < 256 else np.uint16)

    def _support(self, prompt_length: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        ids = np.concatenate([np.zeros(0, np.int32), *self.support])
        lengths = [0] * prompt_length + [len(allowed) for allowed in self.support]
        largest = int(ids.max(initial=0))
        return ids.astype(np.uint16 if largest < 2**16 else np.int32), np.asarray(lengths, np.int32)


def _after_prompt(rows: list[NDArray[Any]], prompt_length: int, filler: float) -> NDArray[Any] | None:
    """[prompt_length + len(rows), K]; None for a response without tokens, which has no K."""
    if not rows:
        return None
    response = np.stack(rows)
    return np.concatenate([np.full((prompt_length, response.shape[1]), filler, response.dtype), response])
