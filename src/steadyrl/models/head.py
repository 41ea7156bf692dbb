"""The output layer of a model, apart from the rest: log-probabilities without tokens x vocabulary.

A model is run to the input of its output layer. What follows the layer (a factor, a soft-cap) is not guessed from
the name of the model: the numbers that its config offers are tried, and the ones that give the model's own
logits are used. A model for which none does keeps its whole logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadyrl.models.logprobs import MAX_LOGITS, Projection, chosen_logp, logp_at, token_logp

logger = logging.getLogger(__name__)

# Names under which a config keeps a factor of the logits, or a divisor of them: both are tried
FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
SOFTCAP = "final_logit_softcapping"


class Head(Protocol):
    """A model in two parts: `states` runs all but the output layer, the rest speaks about rows of the states."""

    @property
    def model(self) -> PreTrainedModel: ...

    def states(self, **inputs: Tensor) -> Tensor:
        """[S, W, D]: what `logp` and `logp_at` need, for each position of `input_ids` [S, W]."""
        ...

    def logp(self, states: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
        """[T] float32 log-probabilities of `target_ids` [T] from `states` [T, D], with gradient."""
        ...

    def logp_at(self, states: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """[T, K] float32 log-probabilities of `token_ids` [T, K] from `states` [T, D], without gradient."""
        ...


@dataclass(frozen=True)
class LinearHead:
    """Logits are `softcap(scale * linear(states))`; they are made in chunks where there are many of them."""

    model: PreTrainedModel
    scale: float
    softcap: float | None

    def states(self, **inputs: Tensor) -> Tensor:
        return _enter(self.model, inputs, lambda states: states[..., :0, :])[0]

    def projection(self) -> Projection:
        """The output layer as it is now; under autocast in the dtype of the autocast, like the model's."""
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, nn.Linear)
        dtype = _product_dtype(layer.weight)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return Projection(layer.weight.to(dtype), bias, self.scale, self.softcap)

    def logp(self, states: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
        projection = self.projection()
        states = states.to(projection.weight.dtype)
        if len(states) * projection.vocabulary <= MAX_LOGITS:  # they fit: keeping them saves the second product
            return token_logp(projection.logits(states), target_ids, temperature)
        return chosen_logp(projection, states, target_ids, temperature)[0]

    def logp_at(self, states: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        projection = self.projection()
        return logp_at(projection, states.to(projection.weight.dtype), token_ids, temperature)


@dataclass(frozen=True)
class WholeLogits:
    """For a model whose output layer cannot be read: its states are its logits."""

    model: PreTrainedModel

    def states(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs, use_cache=False).logits

    def logp(self, states: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
        return token_logp(states, target_ids, temperature)

    @torch.no_grad()
    def logp_at(self, states: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return torch.log_softmax(states.float() / temperature, dim=-1).gather(-1, token_ids)


def read_head(model: PreTrainedModel) -> Head:
    """How to get log-probabilities out of `model`; runs it once, on one token.

    The weights are looked up at every call, so they may change. To be called before the weights are sharded.
    """
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear:
        device = layer.weight.device
        states = torch.randn(1, 1, layer.in_features, generator=torch.Generator().manual_seed(0)).to(device)
        with torch.no_grad():
            # large enough for a soft-cap to show
            states = (states * (50 / layer(states.to(layer.weight.dtype)).float().std())).to(layer.weight.dtype)
            inputs = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=device)}
            _, wanted = _enter(model, inputs, lambda _: states)
            for scale, softcap in _candidates(model.config.get_text_config()):
                head = LinearHead(model, scale, softcap)
                if _same(head.projection().logits(states), wanted.float(), layer.weight.dtype):
                    return head
    logger.warning(
        "%s makes its logits in a way that is not known here, so they are kept for all tokens at once: lower "
        "trainer.tokens_per_micro_batch if memory runs out",
        type(model).__name__,
    )
    return WholeLogits(model)


def _enter(model: PreTrainedModel, inputs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Run the model with another input to its output layer; returns the input it had, and the logits."""
    caught: list[Tensor] = []

    def catch(_layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        caught.append(args[0])
        return (change(args[0]),)

    layer = model.get_output_embeddings()
    assert layer is not None
    handle = layer.register_forward_pre_hook(catch)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    (states,) = caught
    return states, logits


def _candidates(config: Any) -> Iterator[tuple[float, float | None]]:
    """(scale, soft-cap) pairs that a config allows, the plain one first."""
    numbers = [getattr(config, name, None) for name in FACTORS]
    factors = [float(number) for number in numbers if isinstance(number, int | float) and number]
    softcap = getattr(config, SOFTCAP, None)
    for cap in (None, softcap) if softcap else (None,):
        for scale in (1.0, *factors, *(1 / factor for factor in factors)):
            yield scale, cap


def _same(logits: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    return logits.shape == wanted.shape and bool(
        torch.allclose(logits, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    )


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
