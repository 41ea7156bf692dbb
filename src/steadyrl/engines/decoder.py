"""Continuous batching over any Hugging Face causal language model with a key-value cache.

Up to `max_sequences` responses are sampled together, one token each in a `step()`. A response that is finished
leaves, and the one that has waited longest takes its place in the next step: its prompt runs through the model
apart, then its keys and values join the others'.

Every sequence draws with its own table of random numbers. What it shares the batch with can therefore change its
tokens only through float rounding; the same submissions between the same steps give the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from steadyrl.engines.kv_cache import merge, select, stack_left_padded
from steadyrl.engines.next_token import extend
from steadyrl.engines.sequence import Sequence
from steadyrl.engines.stop_strings import Decode, stopped_text
from steadyrl.models.load import context_length
from steadyrl.models.routing import record_routing
from steadyrl.types import Finish

PREFILL_TOKENS = 65_536  # padded tokens in one forward pass over prompts
# Places come free one by one, and a pass over one short prompt takes as long as one over several: with the prompt of
# the sequence that is admitted go those next in line, up to these limits.
PROMPTS_AHEAD = 8
TOKENS_AHEAD = 2_048  # padded


@dataclass
class _Batch:
    """The sequences that have a place. Row i of every tensor belongs to `sequences[i]`."""

    sequences: list[Sequence]
    cache: DynamicCache  # of W tokens: all but the last one of each sequence
    attention_mask: Tensor  # [B, W] int64, 0 on the padding, which is on the left

    def living(self) -> list[int]:
        return [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]

    def keep(self, rows: list[int]) -> _Batch:
        """Only these rows, without columns that are padding in all of them."""
        index = torch.tensor(rows, device=self.attention_mask.device)
        mask = self.attention_mask[index]
        slack = mask.shape[1] - int(mask.sum(dim=1).max())
        cache = select(self.cache, index, first_column=slack)
        return _Batch([self.sequences[row] for row in rows], cache, mask[:, slack:])

    def join(self, other: _Batch) -> _Batch:
        mask = stack_left_padded(self.attention_mask, other.attention_mask, dim=1)
        return _Batch([*self.sequences, *other.sequences], merge(self.cache, other.cache), mask)


@dataclass
class _Prefilled:
    """Prompts that have been through the model under the present weights."""

    row: dict[bytes, int]  # of each prompt, by the bytes of its token ids
    cache: DynamicCache
    attention_mask: Tensor  # [P, W] int64
    logits: Tensor  # [P, V] of the first response token
    experts: list[NDArray[np.int16]] | None  # [p, L, K] for each prompt


class Decoder:
    """Samples sequences. Weights may change between two steps, if `weights_changed` is told."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        max_sequences: int,
        records_routing: bool,
        decode: Decode,
    ) -> None:
        self._model = model
        self._device = model.device
        self._eos = eos_token_ids
        self._max_sequences = max_sequences
        self._records_routing = records_routing
        self._decode = decode
        self._last_position = context_length(model) - 1
        self._waiting: deque[Sequence] = deque()
        self._batch: _Batch | None = None
        self._prefilled: _Prefilled | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """Without a place yet, in the order in which they will get one."""
        return list(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Those that have a place."""
        batch = self._batch
        return [] if batch is None else [batch.sequences[row] for row in batch.living()]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; each is admitted as soon as there is a place, first come, first served."""
        self._waiting.extend(sequences)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that waits or runs with the tokens it has."""
        assert sequence.finish is None, "a finished sequence cannot be canceled"
        self._finish(sequence, "canceled")
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    @torch.inference_mode()
    def step(self, version: int) -> list[Sequence]:
        """Sample one token for every sequence that has a place; returns those that this finished.

        Args:
            version: of the weights that the model holds now; it is noted on every sampled token.
        """
        alive = self._drop_finished()
        places = self._max_sequences - alive
        admitted = [self._waiting.popleft() for _ in range(min(places, len(self._waiting)))]
        logits = []
        if self._batch is not None:
            logits.append(self._decode_step(self._batch))
        if admitted:
            joined, first = self._admit(admitted)
            self._batch = joined if self._batch is None else self._batch.join(joined)
            logits.append(first)
        if self._batch is None:
            return []
        return self._sample(self._batch, logits[0] if len(logits) == 1 else torch.cat(logits), version)

    @torch.inference_mode()
    def weights_changed(self, *, rebuild_cache: bool) -> None:
        """To be called after the model's weights were changed.

        Args:
            rebuild_cache: compute the keys and values of everything sampled so far again, under the new weights.
                Recorded experts and log-probabilities stay what they were when the tokens were sampled.
        """
        self._prefilled = None
        running = self.running
        if running and rebuild_cache:
            cache, mask, _, _ = self._prefill([sequence.input_ids() for sequence in running])
            self._batch = _Batch(running, cache, mask)

    # ---- the batch ----

    def _drop_finished(self) -> int:
        """Let finished rows go where that pays, or a place is wanted; returns how many sequences run."""
        if self._batch is None:
            return 0
        rows, size = self._batch.living(), len(self._batch.sequences)
        if not rows:
            self._batch = None
        elif len(rows) <= size // 2 or (self._waiting and len(rows) < size):
            self._batch = self._batch.keep(rows)
        return len(rows)

    def _admit(self, sequences: list[Sequence]) -> tuple[_Batch, Tensor]:
        """A batch of new sequences, and the logits [B, V] of their first tokens. A prompt of several is run once."""
        prefilled = self._prefilled
        if prefilled is None or any(_key(sequence) not in prefilled.row for sequence in sequences):
            prefilled = self._prefill_prompts(sequences)
        rows = [prefilled.row[_key(sequence)] for sequence in sequences]
        index = torch.tensor(rows, device=self._device)
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.admitted_s = time.monotonic()
            if prefilled.experts is not None:
                sequence.experts = [prefilled.experts[row]]
        wanted = self._waiting and _key(self._waiting[0]) in prefilled.row
        self._prefilled = prefilled if wanted else None
        batch = _Batch(sequences, select(prefilled.cache, index), prefilled.attention_mask[index])
        return batch, prefilled.logits[index]

    def _prefill_prompts(self, sequences: list[Sequence]) -> _Prefilled:
        """Run the prompts of these sequences through the model, and some of those that wait."""
        prompts = {_key(sequence): sequence.prompt.token_ids for sequence in sequences}
        longest = max(len(token_ids) for token_ids in prompts.values())
        for sequence in self._waiting:
            longest = max(longest, len(sequence.prompt.token_ids))
            if _key(sequence) not in prompts:
                if len(prompts) >= PROMPTS_AHEAD or (len(prompts) + 1) * longest > TOKENS_AHEAD:
                    break
                prompts[_key(sequence)] = sequence.prompt.token_ids
        row = {key: index for index, key in enumerate(prompts)}
        return _Prefilled(row, *self._prefill(list(prompts.values())))

    def _prefill(
        self, token_ids: list[NDArray[np.int32]]
    ) -> tuple[DynamicCache, Tensor, Tensor, list[NDArray[np.int16]] | None]:
        """Run rows of tokens through the model: cache, attention mask, logits [B, V] after the last token, experts."""
        rows = max(1, PREFILL_TOKENS // max(len(ids) for ids in token_ids))
        if rows < len(token_ids):
            one, other = self._prefill(token_ids[:rows]), self._prefill(token_ids[rows:])
            experts = None if one[3] is None or other[3] is None else one[3] + other[3]
            mask = stack_left_padded(one[1], other[1], dim=1)
            return merge(one[0], other[0]), mask, torch.cat([one[2], other[2]]), experts
        input_ids, attention_mask = left_padded(token_ids, self._device)
        cache = DynamicCache()
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits, chosen = self._forward(input_ids, attention_mask, position_ids, cache)
        if chosen is None:
            return cache, attention_mask, logits, None
        width = input_ids.shape[1]
        experts = [row[width - len(ids) :].copy() for row, ids in zip(chosen, token_ids, strict=True)]
        return cache, attention_mask, logits, experts

    def _decode_step(self, batch: _Batch) -> Tensor:
        """Run the newest token of every row through the model: logits [B, V] of the next one."""
        newest = [sequence.tokens[-1] if sequence.tokens else 0 for sequence in batch.sequences]
        input_ids = torch.tensor(newest, device=self._device).unsqueeze(1)
        # a finished row that is still in the batch must not run out of the model's positions
        position_ids = batch.attention_mask.sum(dim=1, keepdim=True).clamp(max=self._last_position)
        batch.attention_mask = torch.cat([batch.attention_mask, torch.ones_like(input_ids)], dim=1)
        logits, experts = self._forward(input_ids, batch.attention_mask, position_ids, batch.cache)
        if experts is not None:
            for sequence, chosen in zip(batch.sequences, experts, strict=True):
                if sequence.finish is None:
                    sequence.experts.append(chosen.copy())
        return logits

    def _forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, NDArray[np.int16] | None]:
        """Logits [B, V] after the last column; experts [B, width, L, K] where routing is recorded."""
        with record_routing(self._model) if self._records_routing else nullcontext() as chosen:
            output = self._model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits = output.logits[:, -1]
        if chosen is None:
            return logits, None
        layers = torch.stack(chosen, dim=1)  # [B * width, L, K]
        return logits, layers.unflatten(0, input_ids.shape).to(torch.int16).cpu().numpy()

    def _sample(self, batch: _Batch, logits: Tensor, version: int) -> list[Sequence]:
        """Draw a token for every living row and note it; returns the sequences that it finished."""
        rows = batch.living()
        sequences = [batch.sequences[row] for row in rows]
        if len(rows) < len(batch.sequences):
            logits = logits[torch.tensor(rows, device=logits.device)]
        extended = extend(sequences, logits, version, self._eos)
        for sequence, is_extended in zip(sequences, extended, strict=True):
            if is_extended:
                self._finish_if_done(sequence)
            else:
                self._finish(sequence, "error")
        return [sequence for sequence in sequences if sequence.finish is not None]

    def _finish_if_done(self, sequence: Sequence) -> None:
        request, length = sequence.request, len(sequence.tokens)
        if sequence.tokens[-1] in self._eos:
            self._finish(sequence, "stop")
        elif (
            request.stop
            and length >= request.min_response_tokens
            and (text := stopped_text(sequence.tokens, request.stop, self._decode)) is not None
        ):
            sequence.finish, sequence.text = "stop", text
        elif length == request.max_response_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish, sequence.text = finish, self._decode(sequence.tokens)


def _key(sequence: Sequence) -> bytes:
    return sequence.prompt.token_ids.tobytes()


def left_padded(rows: list[NDArray[np.int32]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, width] int64, the rows flush right.

    The mask comes from the lengths: a token that is also the padding token, or an end token, is seen like any other.
    """
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    attention_mask = (torch.arange(width) >= (width - lengths).unsqueeze(1)).long()
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    input_ids[attention_mask.bool()] = torch.from_numpy(np.concatenate(rows)).long()
    return input_ids.to(device), attention_mask.to(device)
