"""A model as the trainer runs it: from a micro-batch to the log-probabilities of its sampled tokens.

`Scorer` is a module, so that everything that touches the weights, the output layer too, happens inside one forward
pass: a model that is spread over ranks (sharding.py) has its weights together only then.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steadyrl.axes import DppoBoundary
from steadyrl.config import RunConfig
from steadyrl.diagnostics.trust_region import topk_divergence
from steadyrl.errors import ConfigError
from steadyrl.models.head import Head, LinearHead
from steadyrl.models.logprobs import Support, chosen_logp
from steadyrl.models.routing import RoutingReplay, replay_routing
from steadyrl.objective.rule import Layout
from steadyrl.types import TrainBatch


@dataclass(frozen=True)
class Scored:
    """A micro-batch with what frozen policies say about it; all [S * W]."""

    batch: TrainBatch
    layout: Layout
    old_logp: Tensor | None  # of the old_actor and step_start anchors
    reference_logp: Tensor | None

    @property
    def behavior_logp(self) -> Tensor:
        return self.batch.behavior_logp.flatten()

    def row(self, index: int) -> Scored:
        """One response of it."""
        single, shape = self.batch.rows(index, index + 1), self.batch.input_ids.shape
        logp = [None if flat is None else flat.view(shape)[index] for flat in (self.old_logp, self.reference_logp)]
        return Scored(single, layout_of(single), *logp)

    def blank(self) -> Scored:
        """The first position of it, not to be trained on."""
        blank = self.batch.blank()
        logp = [None if flat is None else flat[:1] for flat in (self.old_logp, self.reference_logp)]
        return Scored(blank, layout_of(blank), *logp)


def layout_of(batch: TrainBatch) -> Layout:
    """Loss mask and sequence of each of the S * W positions."""
    size, width = batch.loss_mask.shape
    sequence = torch.arange(size, device=batch.loss_mask.device).repeat_interleave(width)
    return Layout(batch.loss_mask.flatten(), sequence, size)


def age_of(batch: TrainBatch, version: int) -> Tensor:
    """[S * W] int64: lag of every token, 0 where not sampled."""
    versions = batch.versions.flatten()
    return torch.where(versions >= 0, version - versions, 0)


class Forward(NamedTuple):
    """A forward pass over a micro-batch of [S, W]."""

    logp: Tensor  # [S * W] float32, 0 where not sampled
    divergence: Tensor | None  # [S * W], where the objective needs it
    replay: RoutingReplay | None


class Scorer(nn.Module):
    """Log-probabilities under one model.

    Args:
        head: of the model; its weights are looked up at every call, so they may change.
        config: of the run.
        device: where the micro-batches are.
    """

    def __init__(self, head: Head, config: RunConfig, device: torch.device) -> None:
        super().__init__()
        self.model = head.model
        self._head = head
        self._temperature = config.sampling.temperature
        self._rule = config.objective.boundary
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16")

    def forward(self, batch: TrainBatch, *, replays_routing: bool) -> Forward:
        """Log-probabilities of the sampled tokens, through the recorded experts if they are to be replayed."""
        experts = batch.routed_experts if replays_routing else None
        assert experts is not None or not replays_routing, "routing replay needs an engine that records the experts"
        sampled = batch.loss_mask.flatten().nonzero().squeeze(1)
        with self._autocast:
            with nullcontext() if experts is None else replay_routing(self.model, experts) as replay:
                states = self._head.states(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            states = states.flatten(0, 1)[sampled]
            logp = self._sampled_logp(batch, states, sampled)
            # only the loss asks for it
            divergence = self._divergence(batch, states, sampled) if torch.is_grad_enabled() else None
        return Forward(logp.new_zeros(batch.loss_mask.numel()).index_put((sampled,), logp), divergence, replay)

    def _sampled_logp(self, batch: TrainBatch, states: Tensor, sampled: Tensor) -> Tensor:
        """Log-probabilities of the tokens at the positions `sampled` [T], over the recorded support if there is one.

        Args:
            states: [T, D], of the head.
        """
        target_ids = batch.target_ids.flatten()[sampled]
        if batch.support_ids is None or batch.support_lengths is None:
            return self._head.logp(states, target_ids, self._temperature)
        if not isinstance(self._head, LinearHead):
            raise ConfigError(
                f"the output layer of {type(self.model).__name__} cannot be read, so it cannot be trained on what "
                "top-p or top-k left: set sampling.top_p=1 and sampling.top_k=0"
            )
        support = Support(torch.cat(batch.support_ids), batch.support_lengths.flatten()[sampled])
        projection = self._head.projection()
        states = states.to(projection.weight.dtype)
        return chosen_logp(projection, states, target_ids, self._temperature, support=support)[0]

    @torch.no_grad()
    def _divergence(self, batch: TrainBatch, states: Tensor, sampled: Tensor) -> Tensor | None:
        """[S * W]: how far the policy is from the engine in the state each sampled token was drawn in, 0 elsewhere."""
        if batch.top_ids is None or batch.top_logp is None:
            return None
        kind = "kl" if isinstance(self._rule, DppoBoundary) and self._rule.divergence == "topk_kl" else "tv"
        current = self._head.logp_at(states, batch.top_ids.flatten(0, 1)[sampled], self._temperature)
        divergence = topk_divergence(batch.top_logp.flatten(0, 1)[sampled], current, kind)
        return divergence.new_zeros(batch.loss_mask.numel()).index_put((sampled,), divergence)
