"""The learner on one device: forward, loss, backward, optimizer step.

Micro-batches only bound memory. Counts and the SAT quantile belong to the whole optimizer batch, so
that the loss and its gradient are the same however the batch is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import ObjectiveConfig, RunConfig, SatBoundary
from steadyrl.diagnostics.mismatch import max_abs, mismatch_sums
from steadyrl.diagnostics.staleness import lag_extremes, lag_histogram, lag_sums
from steadyrl.errors import TrainingError
from steadyrl.models.load import load_model, save_model
from steadyrl.models.logprobs import token_logp
from steadyrl.models.routing import RoutingReplay, replay_routing
from steadyrl.objective.loss import LossOutput, policy_loss, trust_region_score
from steadyrl.objective.quantile import order_statistic
from steadyrl.trainer.optim import learning_rate, load_optimizer, make_optimizer, save_optimizer
from steadyrl.types import BatchCounts, Sums, TrainBatch, add_sums, pooled


class LocalLearner:
    """A `Learner` in this process."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
        self.version = 0
        self._model = model.eval()  # no dropout: a ratio must not move by chance
        self._tokenizer = tokenizer
        self._objective: ObjectiveConfig = config.objective
        self._config = config.trainer
        self._temperature = config.sampling.temperature
        self._replays = config.model.routing_replay
        self._largest_lag = config.pipeline.largest_lag
        self._optimizer = make_optimizer(model, config.trainer)
        self._reference = copy.deepcopy(model).requires_grad_(False) if config.objective.kl_coef > 0 else None

    def named_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def train_step(
        self, micro_batches: Sequence[TrainBatch], old_actor: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """One optimizer step; see `trainer.base.Learner`."""
        counts = BatchCounts(
            num_tokens=sum(int(batch.loss_mask.sum()) for batch in micro_batches),
            num_sequences=sum(int(batch.loss_mask.any(dim=1).sum()) for batch in micro_batches),
        )
        anchors = [self._anchor_logp(batch, old_actor) for batch in micro_batches]
        quantile = self._batch_quantile(micro_batches, anchors)
        statistics = _Statistics(self.version, self._largest_lag)
        self._optimizer.zero_grad(set_to_none=True)
        for batch, anchor_logp in zip(micro_batches, anchors, strict=True):
            logp, replay = self._logp(self._model, batch)
            output = self._loss(batch, logp, anchor_logp, counts, quantile)
            output.loss.backward()
            statistics.add(batch, logp.detach(), output, replay)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            culprits = self._not_finite(micro_batches, anchors, counts, quantile)
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the gradient of optimizer step {self.version + 1} is not finite; the weights are still those of "
                f"version {self.version}. Caused by: {culprits}. Look at the log-probabilities of these rollouts; "
                "with a lower trainer.lr, start a new run with model.path set to the model folder of the checkpoint"
            )
        lr = learning_rate(self._config, self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.version += 1
        metrics, histograms = statistics.pooled()
        return {**metrics, "optim/grad_norm": float(grad_norm), "optim/lr": lr}, histograms

    def save(self, folder: Path) -> None:
        """The model in Hugging Face format, and the state of the optimizer."""
        save_model(self._model, self._tokenizer, folder / "model")
        save_optimizer(self._optimizer, dict(self._model.named_parameters()), folder / "optimizer.safetensors")

    def load(self, folder: Path, version: int) -> None:
        """Go on from what `save` wrote after `version` optimizer steps."""
        saved = load_model(str(folder / "model"), torch.float32)
        self._model.load_state_dict(saved.state_dict())
        load_optimizer(self._optimizer, dict(self._model.named_parameters()), folder / "optimizer.safetensors")
        self.version = version

    def _logp(self, model: PreTrainedModel, batch: TrainBatch) -> tuple[Tensor, RoutingReplay | None]:
        """[S * W] float32 log-probabilities of the targets, through the recorded experts if there are any."""
        experts = None
        if self._replays and model is not self._reference:  # the reference keeps its own routing
            experts = batch.routed_experts
            assert experts is not None, "routing replay needs an engine that records the experts"
        with nullcontext() if experts is None else replay_routing(model, experts) as replay:
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        return token_logp(logits, batch.target_ids, self._temperature).flatten(), replay

    @torch.no_grad()
    def _anchor_logp(self, batch: TrainBatch, old_actor: Mapping[str, Tensor] | None) -> Tensor:
        """[S * W]: the policy that ratios are taken against."""
        if self._objective.anchor == "rollout":
            return batch.behavior_logp.flatten()
        assert old_actor is not None, "the old_actor anchor needs the weights that sampled"
        current = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        try:
            self._assign(old_actor)
            return self._logp(self._model, batch)[0]
        finally:
            self._assign(current)

    def _assign(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(weights[name])

    @torch.no_grad()
    def _batch_quantile(self, micro_batches: Sequence[TrainBatch], anchors: Sequence[Tensor]) -> Tensor | None:
        """q of SAT over the whole optimizer batch; None where the loss can take it from its micro-batch."""
        rule = self._objective.boundary
        if not isinstance(rule, SatBoundary) or rule.quantile_scope == "microbatch" or len(micro_batches) == 1:
            return None
        scores = [
            trust_region_score(self._objective, self._logp(self._model, batch)[0], anchor, *_layout(batch))
            for batch, anchor in zip(micro_batches, anchors, strict=True)
        ]
        masks = [batch.loss_mask.flatten() for batch in micro_batches]
        return order_statistic(torch.cat(scores), torch.cat(masks), rule.alpha)

    def _loss(
        self, batch: TrainBatch, logp: Tensor, anchor_logp: Tensor, counts: BatchCounts, quantile: Tensor | None
    ) -> LossOutput:
        loss_mask, sequence, num_sequences = _layout(batch)
        reference_logp = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logp = self._logp(self._reference, batch)[0]
        return policy_loss(
            self._objective,
            logp=logp,
            anchor_logp=anchor_logp,
            advantage=batch.advantage[sequence],
            loss_mask=loss_mask,
            sequence=sequence,
            num_sequences=num_sequences,
            counts=counts,
            quantile=quantile,
            reference_logp=reference_logp,
        )

    def _not_finite(
        self,
        micro_batches: Sequence[TrainBatch],
        anchors: Sequence[Tensor],
        counts: BatchCounts,
        quantile: Tensor | None,
    ) -> str:
        """The rollouts whose gradient alone is not finite, by name."""
        culprits = []
        for batch, anchor_logp in zip(micro_batches, anchors, strict=True):
            anchor_rows = anchor_logp.unflatten(0, batch.input_ids.shape)
            for row, name in enumerate(batch.rollout_ids):
                self._optimizer.zero_grad(set_to_none=True)
                single = batch.rows(row, row + 1)
                logp, _ = self._logp(self._model, single)
                self._loss(single, logp, anchor_rows[row], counts, quantile).loss.backward()
                gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
                if not all(torch.isfinite(gradient).all() for gradient in gradients):
                    gap = float((logp.detach() - anchor_rows[row])[single.loss_mask[0]].abs().max())
                    culprits.append(f"rollout of {name}, largest |log ratio| {gap:.4g}")
        return "; ".join(culprits[:8]) or "no single rollout, only their sum"


def _layout(batch: TrainBatch) -> tuple[Tensor, Tensor, int]:
    """Loss mask [S * W], sequence of each position [S * W], and S."""
    size, width = batch.loss_mask.shape
    return batch.loss_mask.flatten(), torch.arange(size).repeat_interleave(width), size


@dataclass
class _Statistics:
    """Collects over the micro-batches of a step, and divides once."""

    version: int
    largest_lag: int
    sums: Sums = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    lags: Tensor | None = None

    def add(self, batch: TrainBatch, logp: Tensor, output: LossOutput, replay: RoutingReplay | None) -> None:
        loss_mask = batch.loss_mask.flatten()
        behavior_logp, versions = batch.behavior_logp.flatten(), batch.versions.flatten()
        add_sums(self.sums, output.sums)
        add_sums(self.sums, mismatch_sums(logp, behavior_logp, loss_mask))
        add_sums(self.sums, lag_sums(self.version, versions, loss_mask))
        if replay is not None:
            add_sums(self.sums, {"routing/disagreement": (sum(replay.disagreements), sum(replay.tokens))})
        lowest, highest = lag_extremes(self.version, versions, loss_mask)
        _keep(self.minima, torch.minimum, {**output.extremes, "staleness/lag_min": lowest})
        largest_gap = max_abs(logp, behavior_logp, loss_mask)
        _keep(self.maxima, torch.maximum, {"staleness/lag_max": highest, "mismatch/max_abs": largest_gap})
        lags = lag_histogram(self.version, versions, loss_mask, self.largest_lag)
        self.lags = lags if self.lags is None else self.lags + lags

    def pooled(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        means = pooled(self.sums)
        means["mismatch/variance"] = means.pop("mismatch/delta_squared") - means["mismatch/delta"] ** 2
        extremes = {name: float(value) for name, value in {**self.minima, **self.maxima}.items()}
        assert self.lags is not None
        return {**means, **extremes}, {"lag": self.lags.tolist()}


def _keep(kept: dict[str, Tensor], choose, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        kept[name] = choose(kept[name], value) if name in kept else value
