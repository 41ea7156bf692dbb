"""The embedded rollout engine: continuous batching with a KV cache, on the model classes the trainer uses.

It runs in its own precision (bfloat16 by default), token by token, so its log-probabilities differ from
the float32 trainer's as those of a serving engine do. What it reports is the float32 log-probability of
the distribution that it really sampled from.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.engines.base import assign_weights
from steadyrl.engines.decoder import Decoder
from steadyrl.engines.kv_cache import check_cache
from steadyrl.engines.sequence import Sequence
from steadyrl.errors import EngineError
from steadyrl.models.load import context_length
from steadyrl.models.routing import routers
from steadyrl.types import GenerationRequest, Rollout


class LocalEngine:
    """A `StreamingEngine` in this process.

    Args:
        model: used by this engine alone.
        tokenizer: gives responses their text, and stop strings their meaning.
        eos_token_ids: each of them ends a response.
        max_sequences: sampled together; more wait for a place.
        records_routing: report the experts of every token.
        cache_on_update: what becomes of the keys and values of running responses when weights arrive: "keep" those
            of the weights that computed them, or "rebuild" them under the new weights, for the price of a forward
            pass over everything sampled so far. Log-probabilities, versions and experts that were reported stay.

    Raises:
        ConfigError: a model that cannot be decoded, or whose routing cannot be recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: frozenset[int],
        max_sequences: int,
        records_routing: bool,
        cache_on_update: Literal["keep", "rebuild"] = "keep",
    ) -> None:
        check_cache(model)
        if records_routing:
            routers(model)
        self.version = -1  # nothing broadcast yet
        self._model = model.eval()
        self._rebuilds_cache = cache_on_update == "rebuild"
        self._decoder = Decoder(
            model,
            eos_token_ids=eos_token_ids,
            max_sequences=max_sequences,
            records_routing=records_routing,
            decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
        )
        self._next_id = itertools.count()
        self._ids: dict[Sequence, int] = {}  # of those that were submitted and not handed out
        self._finished: dict[int, Rollout] = {}  # not handed out yet

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Copy the weights in, in this model's dtype; the checksum is of what the model then holds.

        Responses may be running: their next token comes from the new weights.

        Raises:
            EngineError: names or shapes that do not map one to one; the model is as it was.
        """
        checksum = assign_weights(self._model, weights)
        self.version = version
        self._decoder.weights_changed(rebuild_cache=self._rebuilds_cache)
        return checksum

    def close(self) -> None:
        """Nothing to release."""

    def generate(self, request: GenerationRequest) -> list[Rollout]:
        """See `base.Engine`. Responses that are running already go on meanwhile; `step` hands them out later."""
        ids = self.submit(request)
        missing = set(ids) - self._finished.keys()
        while missing:
            self._step()
            missing -= self._finished.keys()
        return [self._finished.pop(sequence_id) for sequence_id in ids]

    def submit(self, request: GenerationRequest) -> list[int]:
        """See `base.StreamingEngine`."""
        fits = self._fits(request)
        sequences = [
            Sequence(prompt, group, request, noise)
            for group, prompt in enumerate(request.prompts)
            for noise in _noise(request, group)
        ]
        ids = {sequence: next(self._next_id) for sequence in sequences}
        self._ids |= ids
        for sequence in sequences:
            if not fits[sequence.group]:
                sequence.finish = "too_long"
                self._hand_out(sequence)
        self._decoder.submit(sequence for sequence in sequences if fits[sequence.group])
        return list(ids.values())

    def step(self) -> dict[int, Rollout]:
        """See `base.StreamingEngine`."""
        self._step()
        finished, self._finished = self._finished, {}
        return finished

    def cancel(self, sequence_id: int) -> Rollout:
        """See `base.StreamingEngine`."""
        (sequence,) = (sequence for sequence, known in self._ids.items() if known == sequence_id)
        self._decoder.cancel(sequence)
        del self._ids[sequence]
        return sequence.rollout()

    def overdue(self, *, tokens: int | None = None, seconds: float | None = None) -> list[int]:
        """See `base.StreamingEngine`."""
        now = time.monotonic()
        return [
            self._ids[sequence]
            for sequence in self._decoder.running
            if (tokens is not None and len(sequence.tokens) >= tokens)
            or (seconds is not None and now - sequence.admitted_s >= seconds)
        ]

    @property
    def num_running(self) -> int:
        return len(self._decoder.running)

    @property
    def num_waiting(self) -> int:
        return len(self._decoder.waiting)

    def _step(self) -> None:
        for sequence in self._decoder.step(self.version):
            self._hand_out(sequence)

    def _hand_out(self, sequence: Sequence) -> None:
        rollout = sequence.rollout()
        rollout.finished_version = self.version
        self._finished[self._ids.pop(sequence)] = rollout

    def _fits(self, request: GenerationRequest) -> list[bool]:
        """For each prompt, whether prompt and response have room in the model's positions.

        Raises:
            EngineError: one has not, and the request does not say that such prompts are dropped.
        """
        limit = context_length(self._model)
        fits = [len(prompt.token_ids) + request.max_response_tokens <= limit for prompt in request.prompts]
        if not all(fits) and request.long_prompts == "refuse":
            prompt = request.prompts[fits.index(False)]
            raise EngineError(
                f"{prompt.prompt_id} has {len(prompt.token_ids)} tokens; with a response of "
                f"{request.max_response_tokens} it does not fit into the model's {limit} positions: "
                'lower sampling.max_response_tokens, or set sampling.long_prompts="drop" to train without such prompts'
            )
        return fits


def _noise(request: GenerationRequest, group: int) -> NDArray[np.float64]:
    """The random numbers of a prompt's responses: [samples, limit] in [0, 1)."""
    generator = np.random.default_rng([request.seed, request.first + group])
    return generator.random((request.samples_per_prompt, request.max_response_tokens))
