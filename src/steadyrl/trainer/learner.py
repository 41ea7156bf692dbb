"""The learner on one device: forward, loss, backward, optimizer step.

Micro-batches only bound memory. Counts and the SAT quantile belong to the whole optimizer batch, so
that the loss and its gradient are the same however the batch is cut.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.axes import DppoBoundary, M2poBoundary, SatBoundary
from steadyrl.config import RunConfig
from steadyrl.diagnostics.trust_region import topk_divergence
from steadyrl.errors import ConfigError, EngineError, TrainingError
from steadyrl.method import ObjectiveConfig
from steadyrl.models.head import Head, LinearHead, read_head
from steadyrl.models.load import load_model, save_model
from steadyrl.models.logprobs import Support, chosen_logp
from steadyrl.models.routing import RoutingReplay, replay_routing
from steadyrl.objective.loss import LossOutput, anchor_of, batch_threshold, policy_loss, trust_region_score
from steadyrl.objective.rule import Layout
from steadyrl.trainer.base import StepResult
from steadyrl.trainer.optim import learning_rate, load_optimizer, make_optimizer, save_optimizer
from steadyrl.trainer.step_statistics import StepStatistics
from steadyrl.types import BatchCounts, TrainBatch


@dataclass(frozen=True)
class _Scored:
    """A micro-batch with what frozen policies say about it; all [S * W]."""

    batch: TrainBatch
    layout: Layout
    old_logp: Tensor | None  # of the old_actor and step_start anchors
    reference_logp: Tensor | None

    @property
    def behavior_logp(self) -> Tensor:
        return self.batch.behavior_logp.flatten()


@dataclass(frozen=True)
class _Forward:
    """A forward pass of the policy being trained."""

    logp: Tensor  # [S * W] float32
    divergence: Tensor | None  # [S * W], where the objective needs it
    replay: RoutingReplay | None


class LocalLearner:
    """A `Learner` in this process."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
        self.version = 0
        self._model = model.eval()  # no dropout: a ratio must not move by chance
        self._tokenizer = tokenizer
        self._objective: ObjectiveConfig = config.objective
        self._config = config.trainer
        self._temperature = config.sampling.temperature
        self._is_restricted = config.sampling.is_restricted
        self._replays = config.model.routing_replay
        self._largest_lag = config.pipeline.largest_lag
        self._longest_response = config.sampling.max_response_tokens
        self._optimizer = make_optimizer(model, config.trainer)
        self._reference = copy.deepcopy(model).requires_grad_(False) if config.objective.kl_coef > 0 else None
        self._head = read_head(model)
        self._reference_head = read_head(self._reference) if self._reference is not None else None
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.model.dtype == "bfloat16")
        rule = self._objective.boundary
        self._averaged = rule if isinstance(rule, SatBoundary) and rule.quantile_scope == "ema" else None
        self._quantile_ema: float | None = None  # of an averaged quantile, after the last finished step

    def named_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def train_step(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> StepResult:
        """One optimizer step; see `trainer.base.Learner`."""
        counts = BatchCounts(
            num_tokens=sum(int(batch.loss_mask.sum()) for batch in micro_batches),
            num_sequences=sum(int(batch.loss_mask.any(dim=1).sum()) for batch in micro_batches),
        )
        self._check_support(micro_batches)
        scored = self._score(micro_batches, old_weights)
        threshold = self._threshold(scored)
        statistics = StepStatistics(
            version=self.version,
            largest_lag=self._largest_lag,
            longest_response=self._longest_response,
            splits_mismatch=self._objective.anchor == "old_actor",
        )
        self._optimizer.zero_grad(set_to_none=True)
        logp = []
        for part in scored:
            forward = self._forward(part.batch)
            logp.append(forward.logp.detach().view(part.batch.loss_mask.shape))
            output = self._loss(part, forward, counts, threshold)
            output.loss.backward()
            statistics.add(part.batch, part.layout, forward.logp.detach(), part.old_logp, output, forward.replay)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        if not torch.isfinite(grad_norm):
            culprits = self._not_finite(scored, counts, threshold)
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the gradient of optimizer step {self.version + 1} is not finite; the weights are still those of "
                f"version {self.version}. Caused by: {culprits}. Look at the log-probabilities of these rollouts; "
                "with a lower trainer.lr, start a new run with model.path set to the model folder of the checkpoint"
            )
        lr = learning_rate(self._config, self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._step()
        self.version += 1
        if self._averaged is not None and threshold is not None:
            self._quantile_ema = float(threshold)
        metrics, histograms = statistics.pooled()
        return StepResult(
            metrics={**metrics, "optim/grad_norm": float(grad_norm), "optim/lr": lr},
            histograms=histograms,
            logp=logp,
            old_logp=[
                None if part.old_logp is None else part.old_logp.view(part.batch.loss_mask.shape) for part in scored
            ],
        )

    def _check_support(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Raises EngineError where top-p or top-k is set and the engine does not say what it left to draw from."""
        missing = [batch.rollout_ids[0] for batch in micro_batches if batch.support_ids is None]
        if self._is_restricted and missing:
            raise EngineError(
                f"sampling.top_p or sampling.top_k is set, and the rollout of {missing[0]} does not record which "
                "tokens they left to draw from, so its log-probabilities cannot be computed again: set "
                "sampling.top_p=1 and sampling.top_k=0, or use an engine that records the support"
            )

    def _step(self) -> None:
        """Move the weights; if that does not give numbers, put the weights before the step back."""
        before = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._optimizer.step()
        if not all(torch.isfinite(parameter).all() for parameter in self._model.parameters()):
            self._assign(before)
            raise TrainingError(
                f"optimizer step {self.version + 1} made weights that are not finite from a finite gradient; the "
                f"weights are still those of version {self.version}. Lower trainer.lr or trainer.weight_decay, or "
                "raise trainer.eps, in a new run with model.path set to the model folder of the checkpoint"
            )

    def save(self, folder: Path) -> None:
        """The model in Hugging Face format, the state of the optimizer, and that of the objective."""
        save_model(self._model, self._tokenizer, folder / "model")
        save_optimizer(self._optimizer, dict(self._model.named_parameters()), folder / "optimizer.safetensors")
        (folder / "objective.json").write_text(json.dumps({"quantile_ema": self._quantile_ema}), encoding="utf-8")

    def load(self, folder: Path, version: int) -> None:
        """Go on from what `save` wrote after `version` optimizer steps."""
        saved = load_model(str(folder / "model"), torch.float32)
        self._model.load_state_dict(saved.state_dict())
        load_optimizer(self._optimizer, dict(self._model.named_parameters()), folder / "optimizer.safetensors")
        self._quantile_ema = json.loads((folder / "objective.json").read_text(encoding="utf-8"))["quantile_ema"]
        self.version = version

    def _forward(self, batch: TrainBatch, head: Head | None = None) -> _Forward:
        """Log-probabilities of the sampled tokens, through the recorded experts if there are any; 0 elsewhere."""
        head = head or self._head
        experts = None
        if self._replays and head is not self._reference_head:  # the reference keeps its own routing
            experts = batch.routed_experts
            assert experts is not None, "routing replay needs an engine that records the experts"
        sampled = batch.loss_mask.flatten().nonzero().squeeze(1)
        with self._autocast:
            with nullcontext() if experts is None else replay_routing(head.model, experts) as replay:
                states = head.states(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            states = states.flatten(0, 1)[sampled]
            logp = _sampled_logp(head, batch, states, sampled, self._temperature)
            # only the loss asks for it
            divergence = self._divergence(batch, head, states, sampled) if torch.is_grad_enabled() else None
        everywhere = torch.zeros(batch.loss_mask.numel()).index_put((sampled,), logp)
        return _Forward(everywhere, divergence, replay)

    @torch.no_grad()
    def _divergence(self, batch: TrainBatch, head: Head, states: Tensor, sampled: Tensor) -> Tensor | None:
        """[S * W]: how far the policy is from the engine in the state each sampled token was drawn in, 0 elsewhere."""
        if batch.top_ids is None or batch.top_logp is None:
            return None
        rule = self._objective.boundary
        kind = "kl" if isinstance(rule, DppoBoundary) and rule.divergence == "topk_kl" else "tv"
        current = head.logp_at(states, batch.top_ids.flatten(0, 1)[sampled], self._temperature)
        divergence = topk_divergence(batch.top_logp.flatten(0, 1)[sampled], current, kind)
        return divergence.new_zeros(batch.loss_mask.numel()).index_put((sampled,), divergence)

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> list[_Scored]:
        """The passes of the frozen policies, old weights first and all together: swapping weights costs a copy."""
        old_logp: list[Tensor | None] = [None] * len(micro_batches)
        if self._objective.needs_old_logp:
            assert old_weights is not None, f"the {self._objective.anchor} anchor needs the weights of that policy"
            with self._weights(old_weights):
                old_logp = [self._forward(batch).logp for batch in micro_batches]
        return [
            _Scored(
                batch,
                _layout(batch),
                old,
                self._forward(batch, self._reference_head).logp if self._reference_head is not None else None,
            )
            for batch, old in zip(micro_batches, old_logp, strict=True)
        ]

    @contextmanager
    def _weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with other weights for a moment."""
        current = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        try:
            self._assign(weights)
            yield
        finally:
            self._assign(current)

    def _assign(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(weights[name])

    @torch.no_grad()
    def _threshold(self, scored: Sequence[_Scored]) -> Tensor | None:
        """What the rule takes from the whole optimizer batch; None where the loss finds it in its micro-batch."""
        rule = self._objective.boundary
        if self._averaged is None and (len(scored) == 1 or not isinstance(rule, SatBoundary | M2poBoundary)):
            return None
        scores, masks, sequences, ages, num_sequences = [], [], [], [], 0
        for part in scored:
            logp = self._forward(part.batch).logp
            age = _age(part.batch, self.version)
            anchor_logp = anchor_of(self._objective, logp, part.behavior_logp, part.old_logp, age)
            scores.append(trust_region_score(self._objective, logp, anchor_logp, part.layout))
            masks.append(part.layout.loss_mask)
            sequences.append(part.layout.sequence + num_sequences)
            ages.append(age)
            num_sequences += part.layout.num_sequences
        whole = Layout(torch.cat(masks), torch.cat(sequences), num_sequences)
        threshold = batch_threshold(self._objective, torch.cat(scores), whole, torch.cat(ages))
        if threshold is None or self._averaged is None or self._quantile_ema is None:
            return threshold
        decay = self._averaged.ema_decay
        return decay * self._quantile_ema + (1 - decay) * threshold

    def _loss(self, part: _Scored, forward: _Forward, counts: BatchCounts, threshold: Tensor | None) -> LossOutput:
        return policy_loss(
            self._objective,
            logp=forward.logp,
            behavior_logp=part.behavior_logp,
            advantage=part.batch.advantage[part.layout.sequence],
            layout=part.layout,
            counts=counts,
            old_logp=part.old_logp,
            reference_logp=part.reference_logp,
            age=_age(part.batch, self.version),
            divergence=forward.divergence,
            threshold=threshold,
        )

    def _not_finite(self, scored: Sequence[_Scored], counts: BatchCounts, threshold: Tensor | None) -> str:
        """The rollouts whose gradient alone is not finite, by name."""
        culprits = []
        for part in scored:
            shape = part.batch.input_ids.shape
            for row, name in enumerate(part.batch.rollout_ids):
                single = part.batch.rows(row, row + 1)
                alone = _Scored(
                    single,
                    _layout(single),
                    *(
                        None if logp is None else logp.unflatten(0, shape)[row]
                        for logp in (part.old_logp, part.reference_logp)
                    ),
                )
                self._optimizer.zero_grad(set_to_none=True)
                forward = self._forward(single)
                self._loss(alone, forward, counts, threshold).loss.backward()
                gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
                if not all(torch.isfinite(gradient).all() for gradient in gradients):
                    gap = float((forward.logp.detach() - alone.behavior_logp)[single.loss_mask[0]].abs().max())
                    culprits.append(f"rollout of {name}, largest |log ratio| {gap:.4g}")
        return "; ".join(culprits[:8]) or "no single rollout, only their sum"


def _sampled_logp(head: Head, batch: TrainBatch, states: Tensor, sampled: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the tokens at the positions `sampled` [T], over the recorded support if there is one.

    Args:
        states: [T, D], of the head.
    """
    target_ids = batch.target_ids.flatten()[sampled]
    if batch.support_ids is None or batch.support_lengths is None:
        return head.logp(states, target_ids, temperature)
    if not isinstance(head, LinearHead):
        raise ConfigError(
            f"the output layer of {type(head.model).__name__} cannot be read, so it cannot be trained on what top-p or "
            "top-k left: set sampling.top_p=1 and sampling.top_k=0"
        )
    support = Support(torch.cat(batch.support_ids), batch.support_lengths.flatten()[sampled])
    projection = head.projection()
    return chosen_logp(projection, states.to(projection.weight.dtype), target_ids, temperature, support=support)[0]


def _layout(batch: TrainBatch) -> Layout:
    """Loss mask and sequence of each of the S * W positions."""
    size, width = batch.loss_mask.shape
    return Layout(batch.loss_mask.flatten(), torch.arange(size).repeat_interleave(width), size)


def _age(batch: TrainBatch, version: int) -> Tensor:
    """[S * W] int64: lag of every token, 0 where not sampled."""
    versions = batch.versions.flatten()
    return torch.where(versions >= 0, version - versions, 0)
