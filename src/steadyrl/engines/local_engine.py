"""The embedded rollout engine: batched sampling with a KV cache, on the model classes the trainer uses.

It runs in its own precision (bfloat16 by default), token by token, so its log-probabilities differ from
the float32 trainer's as those of a serving engine do. What it reports is the float32 log-probability of
the distribution that it really sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.engines.base import weights_checksum
from steadyrl.errors import EngineError
from steadyrl.models.load import context_length
from steadyrl.models.routing import record_routing, routers
from steadyrl.types import Finish, GenerationRequest, Prompt, Rollout


class LocalEngine:
    """An `Engine` in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: frozenset[int],
        max_sequences: int,
        records_routing: bool,
    ) -> None:
        self.version = -1  # nothing broadcast yet
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(sorted(eos_token_ids))
        self._max_sequences = max_sequences
        self._records_routing = records_routing
        self._num_layers = len(routers(model)) if records_routing else 0

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Copy the weights in, in this model's dtype; the checksum is of what the model then holds.

        Raises:
            EngineError: names or shapes that do not map one to one.
        """
        own = dict(self._model.named_parameters())
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())
            raise EngineError(f"the broadcast and the engine's model disagree about {len(odd)} weights, first {odd[0]}")
        with torch.no_grad():
            for name, parameter in own.items():
                if parameter.shape != weights[name].shape:
                    arrived, expected = tuple(weights[name].shape), tuple(parameter.shape)
                    raise EngineError(f"{name} arrives with shape {arrived}; the engine's model has {expected}")
                parameter.copy_(weights[name])
        self.version = version
        return weights_checksum(own)

    def close(self) -> None:
        """Nothing to release."""

    def generate(self, request: GenerationRequest) -> list[Rollout]:
        self._check_length(request)
        samples = request.samples_per_prompt
        prompts = [prompt for prompt in request.prompts for _ in range(samples)]
        generator = torch.Generator().manual_seed(request.seed)
        noise = torch.rand(len(prompts), request.max_response_tokens, generator=generator, dtype=torch.float64)
        rollouts: list[Rollout] = []
        for start in range(0, len(prompts), self._max_sequences):
            rows = slice(start, start + self._max_sequences)
            sampled = self._sample(prompts[rows], noise[rows], request)
            for row, prompt in enumerate(prompts[rows]):
                rollouts.append(self._rollout(prompt, (start + row) // samples, sampled, row))
        return rollouts

    def _check_length(self, request: GenerationRequest) -> None:
        limit = context_length(self._model)
        for prompt in request.prompts:
            if len(prompt.token_ids) + request.max_response_tokens > limit:
                raise EngineError(
                    f"{prompt.prompt_id} has {len(prompt.token_ids)} tokens; with a response of "
                    f"{request.max_response_tokens} it does not fit into the model's {limit} positions: "
                    "lower sampling.max_response_tokens, or leave the prompt out"
                )

    @torch.inference_mode()
    def _sample(self, prompts: list[Prompt], noise: Tensor, request: GenerationRequest) -> _Sampled:
        """Decode until every row met an end token or its limit; finished rows leave the batch."""
        input_ids, attention_mask = _left_pad(prompts)
        size, limit = noise.shape
        sampled = _Sampled.empty(size, limit, min(request.top_logprobs, self._model.config.vocab_size))
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache()
        rows = torch.arange(size)  # which row of the request each row of the batch is
        alive = torch.ones(size, dtype=torch.bool)  # of the batch
        with record_routing(self._model) if self._records_routing else nullcontext([]) as chosen:
            for step in range(limit):
                output = self._model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    cache=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                if self._records_routing:
                    layers = torch.stack(chosen, dim=1)  # [rows * width, L, K]
                    chosen.clear()
                    sampled.keep_routing(layers.unflatten(0, (len(rows), -1)), rows, step)
                logp = torch.log_softmax(output.logits[:, -1].float() / request.temperature, dim=-1)
                broken = ~torch.isfinite(logp.amax(dim=-1))  # NaN logits: nothing can be drawn
                sampled.failed[rows[alive & broken]] = True
                alive = alive & ~broken
                tokens = draw(torch.where(broken.unsqueeze(1), 0.0, logp), noise[rows, step])
                sampled.keep_tokens(tokens, logp, rows, alive, step)
                ended = torch.isin(tokens, self._eos)
                sampled.stopped[rows[alive & ended]] = True
                alive = alive & ~ended
                remaining = int(alive.sum())
                if remaining == 0:
                    break
                attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=1)
                position_ids = position_ids[:, -1:] + 1
                input_ids = tokens.unsqueeze(1)
                if remaining <= len(rows) // 2:
                    keep = alive.nonzero().squeeze(1)
                    cache.batch_select_indices(keep)
                    rows, alive = rows[keep], alive[keep]
                    input_ids, attention_mask, position_ids = input_ids[keep], attention_mask[keep], position_ids[keep]
        return sampled

    def _rollout(self, prompt: Prompt, group: int, sampled: _Sampled, row: int) -> Rollout:
        prompt_length, length = len(prompt.token_ids), int(sampled.lengths[row])
        response = sampled.token_ids[row, :length].numpy().astype(np.int32)
        num_tokens = prompt_length + length
        loss_mask = np.arange(num_tokens) >= prompt_length
        behavior_logp = np.zeros(num_tokens, np.float32)
        behavior_logp[prompt_length:] = sampled.logp[row, :length].numpy()
        finish: Finish = "error" if sampled.failed[row] else "stop" if sampled.stopped[row] else "length"
        top_ids, top_logp = sampled.top(row, prompt_length, length)
        return Rollout(
            prompt_id=prompt.prompt_id,
            group=group,
            token_ids=np.concatenate([prompt.token_ids, response]),
            loss_mask=loss_mask,
            behavior_logp=behavior_logp,
            versions=np.where(loss_mask, self.version, -1).astype(np.int32),
            routed_experts=sampled.routing(row, prompt_length, length) if self._records_routing else None,
            finish=finish,
            text=str(self._tokenizer.decode(response, skip_special_tokens=True)),
            top_ids=top_ids,
            top_logp=top_logp,
            prompt_text=prompt.text,
        )


def draw(logp: Tensor, noise: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at `noise`.

    Args:
        logp: [B, V] float32 log-probabilities.
        noise: [B] float64, uniform in [0, 1).

    Returns:
        [B] int64. A token of probability 0 is never drawn.
    """
    cumulative = logp.double().exp().cumsum(dim=-1)
    cumulative = cumulative / cumulative[:, -1:]
    return torch.searchsorted(cumulative, noise.unsqueeze(1), right=True).squeeze(1)


@dataclass
class _Sampled:
    """What a decoding pass leaves behind, a row for each sequence."""

    token_ids: Tensor  # [B, limit] int64
    logp: Tensor  # [B, limit] float32
    lengths: Tensor  # [B] int64
    stopped: Tensor  # [B] bool: met an end token
    failed: Tensor  # [B] bool: met logits that are not numbers
    prefill_experts: Tensor | None  # [B, width, L, K], left-padded
    decode_experts: Tensor | None  # [B, limit - 1, L, K]: of the response tokens that were fed back
    top_ids: Tensor  # [B, limit, K] int32, K = 0 if not asked for
    top_logp: Tensor  # [B, limit, K] float32

    @classmethod
    def empty(cls, size: int, limit: int, top_logprobs: int) -> _Sampled:
        return cls(
            token_ids=torch.zeros(size, limit, dtype=torch.int64),
            logp=torch.zeros(size, limit),
            lengths=torch.zeros(size, dtype=torch.int64),
            stopped=torch.zeros(size, dtype=torch.bool),
            failed=torch.zeros(size, dtype=torch.bool),
            prefill_experts=None,
            decode_experts=None,
            top_ids=torch.zeros(size, limit, top_logprobs, dtype=torch.int32),
            top_logp=torch.full((size, limit, top_logprobs), -torch.inf),
        )

    def keep_tokens(self, tokens: Tensor, logp: Tensor, rows: Tensor, alive: Tensor, step: int) -> None:
        chosen = logp.gather(-1, tokens.unsqueeze(1)).squeeze(1)
        self.token_ids[rows[alive], step] = tokens[alive]
        self.logp[rows[alive], step] = chosen[alive]
        self.lengths[rows[alive]] += 1
        if k := self.top_ids.shape[2]:
            likeliest = logp[alive].topk(k, dim=-1)
            self.top_ids[rows[alive], step] = likeliest.indices.to(torch.int32)
            self.top_logp[rows[alive], step] = likeliest.values

    def top(self, row: int, prompt_length: int, length: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """The likeliest tokens [prompt_length + length, K] and their log-probabilities, if they were kept."""
        k = self.top_ids.shape[2]
        if k == 0:
            return None, None
        ids, logp = np.zeros((prompt_length, k), np.int32), np.full((prompt_length, k), -np.inf, np.float32)
        return (
            np.concatenate([ids, self.top_ids[row, :length].numpy()]),
            np.concatenate([logp, self.top_logp[row, :length].numpy()]),
        )

    def keep_routing(self, experts: Tensor, rows: Tensor, step: int) -> None:
        if step == 0:
            self.prefill_experts = experts.to(torch.int16)
            size, _, layers, k = experts.shape
            self.decode_experts = torch.zeros(size, max(self.token_ids.shape[1] - 1, 1), layers, k, dtype=torch.int16)
        else:
            assert self.decode_experts is not None
            self.decode_experts[rows, step - 1] = experts[:, 0].to(torch.int16)

    def routing(self, row: int, prompt_length: int, length: int) -> np.ndarray:
        """[prompt_length + length - 1, L, K], in the smallest unsigned type that holds the ids."""
        assert self.prefill_experts is not None
        assert self.decode_experts is not None
        prompt = self.prefill_experts[row, self.prefill_experts.shape[1] - prompt_length :]
        experts = torch.cat([prompt, self.decode_experts[row, : length - 1]]).numpy()
        return experts.astype(np.uint8 if experts.max() < 256 else np.uint16)


def _left_pad(prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, width] int64, prompts flush right."""
    width = max(len(prompt.token_ids) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention_mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
        attention_mask[row, width - len(prompt.token_ids) :] = 1
    return input_ids, attention_mask
