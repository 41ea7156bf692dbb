"""The learner: forward, loss, backward, optimizer step.

Micro-batches only bound memory, and ranks only share the work. Counts and the SAT quantile belong to the whole
optimizer batch, so that the loss and its gradient are the same however the batch is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.config import RunConfig
from steadyrl.errors import CheckpointError, EngineError, TrainingError
from steadyrl.method import ObjectiveConfig
from steadyrl.models.head import read_head
from steadyrl.models.load import load_model, save_model
from steadyrl.objective.loss import LossOutput, anchor_of, batch_threshold, policy_loss, trust_region_score
from steadyrl.objective.rule import Layout
from steadyrl.trainer.base import StepResult
from steadyrl.trainer.optim import learning_rate, load_optimizer, make_optimizer, save_optimizer
from steadyrl.trainer.ranks import ALONE, Ranks, gather_texts
from steadyrl.trainer.scorer import Forward, Scored, Scorer, age_of, layout_of
from steadyrl.trainer.sharding import local, own_part, training_device, whole
from steadyrl.trainer.step_statistics import StepStatistics
from steadyrl.types import BatchCounts, TrainBatch


class LocalLearner:
    """A `Learner` in this process, alone or as one of several ranks.

    Args:
        ranks: who else works on each optimizer step; `train_step` gets the micro-batches of this rank.
        spread: spreads a model over the ranks, in place; without it the model goes to `trainer.device` as it is.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        ranks: Ranks = ALONE,
        spread: Callable[[Scorer], object] | None = None,
    ) -> None:
        self.version = 0
        self._model = model.eval()  # no dropout: a ratio must not move by chance
        self._tokenizer = tokenizer
        self._objective: ObjectiveConfig = config.objective
        self._config = config.trainer
        self._is_restricted = config.sampling.is_restricted
        self._largest_lag = config.pipeline.largest_lag
        self._longest_response = config.sampling.max_response_tokens
        self._ranks = ranks
        self._device = training_device(config.trainer.device)
        place = spread or (lambda scorer: scorer.to(self._device))
        self._is_spread = spread is not None
        self._scorer = Scorer(read_head(model), config, self._device)
        place(self._scorer)
        self._replays = config.model.routing_replay
        self._reference = self._copy() if config.objective.kl_coef > 0 else None  # weights
        self._optimizer = make_optimizer(model, config.trainer)
        rule = self._objective.boundary
        self._averaged = rule if isinstance(rule, SatBoundary) and rule.quantile_scope == "ema" else None
        self._quantile_ema: float | None = None  # of an averaged quantile, after the last finished step

    def named_weights(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU; of several ranks, on the first alone."""
        weights = {}
        for name, parameter in self._model.named_parameters():
            weight = whole(parameter.detach())
            if self._ranks.index == 0:
                weights[name] = weight.cpu()
        return weights

    def train_step(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> StepResult:
        """One optimizer step; see `trainer.base.Learner`."""
        micro_batches = [batch.to(self._device) for batch in micro_batches]
        counts = self._counts(micro_batches)
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
            logp.append(_rows(part.batch, forward.logp.detach()))
            output = self._loss(part, forward, counts, threshold)
            output.loss.backward()
            statistics.add(part.batch, part.layout, forward.logp.detach(), part.old_logp, output, forward.replay)
        grad_norm = self._clip()
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
        metrics, histograms = statistics.pooled(self._ranks)
        return StepResult(
            metrics={**metrics, "optim/grad_norm": float(grad_norm), "optim/lr": lr},
            histograms=histograms,
            logp=logp,
            old_logp=[None if part.old_logp is None else _rows(part.batch, part.old_logp) for part in scored],
        )

    def _counts(self, micro_batches: Sequence[TrainBatch]) -> BatchCounts:
        tokens = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        sequences = sum(int(batch.loss_mask.any(dim=1).sum()) for batch in micro_batches)
        num_micro_batches = len(micro_batches)
        numbers = self._ranks.sum(torch.tensor([tokens, sequences, num_micro_batches], device=self._device)).tolist()
        assert numbers[2] == num_micro_batches * self._ranks.count, "every rank needs the same number of micro-batches"
        return BatchCounts(num_tokens=numbers[0], num_sequences=numbers[1])

    def _check_support(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Raises EngineError where top-p or top-k is set and the engine does not say what it left to draw from."""
        if not self._is_restricted:
            return
        missing = [name for batch in micro_batches if batch.support_ids is None for name in batch.rollout_ids]
        if names := gather_texts(self._ranks, missing[0] if missing else ""):
            raise EngineError(
                f"sampling.top_p or sampling.top_k is set, and the rollout of {names[0]} does not record which "
                "tokens they left to draw from, so its log-probabilities cannot be computed again: set "
                "sampling.top_p=1 and sampling.top_k=0, or use an engine that records the support"
            )

    def _clip(self) -> Tensor:
        """Bound the norm of the whole gradient; returns it as it was, 0-d."""
        parameters = list(self._model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
        return norm

    def _step(self) -> None:
        """Move the weights; if that does not give numbers, put the weights before the step back."""
        before = self._copy()
        self._optimizer.step()
        if not self._all_finite(list(self._model.parameters())):
            self._assign(before)
            raise TrainingError(
                f"optimizer step {self.version + 1} made weights that are not finite from a finite gradient; the "
                f"weights are still those of version {self.version}. Lower trainer.lr or trainer.weight_decay, or "
                "raise trainer.eps, in a new run with model.path set to the model folder of the checkpoint"
            )

    def _all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all numbers of them are, on all ranks."""
        finite = [torch.isfinite(local(tensor)).all() for tensor in tensors]
        return int(self._ranks.sum((~torch.stack(finite)).sum())) == 0

    def save(self, folder: Path) -> None:
        """The model in Hugging Face format, the state of the optimizer, and that of the objective.

        Raises:
            CheckpointError: the first rank could not write.
        """
        weights = self._whole_state() if self._is_spread else None
        problem = ""
        if self._ranks.index == 0:
            try:
                save_model(self._model, self._tokenizer, folder / "model", weights)
                state = json.dumps({"quantile_ema": self._quantile_ema})
                (folder / "objective.json").write_text(state, encoding="utf-8")
            except Exception as error:  # OSError, SafetensorError; the tokenizer raises a plain Exception
                problem = str(error)
        if problems := gather_texts(self._ranks, problem):
            raise CheckpointError(problems[0])
        save_optimizer(self._optimizer, dict(self._model.named_parameters()), folder)

    def _whole_state(self) -> dict[str, Tensor]:
        """The weights, and the buffers that belong to the model; tied weights once."""
        tied = dict(self._model.named_parameters(remove_duplicate=False))
        return self.named_weights() | {name: b for name, b in self._model.state_dict().items() if name not in tied}

    def load(self, folder: Path, version: int) -> None:
        """Go on from what `save` wrote after `version` optimizer steps."""
        saved = load_model(str(folder / "model"), torch.float32)
        self._assign(dict(saved.named_parameters()))
        load_optimizer(self._optimizer, dict(self._model.named_parameters()), folder)
        self._quantile_ema = json.loads((folder / "objective.json").read_text(encoding="utf-8"))["quantile_ema"]
        self.version = version

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> list[Scored]:
        """The passes of the frozen policies, of each all together: swapping weights costs a copy."""
        old_logp: list[Tensor | None] = [None] * len(micro_batches)
        if self._objective.needs_old_logp:
            assert old_weights is not None, f"the {self._objective.anchor} anchor needs the weights of that policy"
            with self._weights(old_weights):
                old_logp = [self._forward(batch).logp for batch in micro_batches]
        reference_logp: list[Tensor | None] = [None] * len(micro_batches)
        if self._reference is not None:
            with self._weights(self._reference):  # which keeps its own routing
                reference_logp = [self._scorer(batch, replays_routing=False).logp for batch in micro_batches]
        return [
            Scored(batch, layout_of(batch), old, reference)
            for batch, old, reference in zip(micro_batches, old_logp, reference_logp, strict=True)
        ]

    def _forward(self, batch: TrainBatch) -> Forward:
        return self._scorer(batch, replays_routing=self._replays)

    @contextmanager
    def _weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with other weights for a moment."""
        current = self._copy()
        try:
            self._assign(weights)
            yield
        finally:
            self._assign(current)

    def _copy(self) -> dict[str, Tensor]:
        """What this rank holds of the weights."""
        return {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def _assign(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            local(parameter).copy_(own_part(parameter, weights[name]))

    @torch.no_grad()
    def _threshold(self, scored: Sequence[Scored]) -> Tensor | None:
        """What the rule takes from the whole optimizer batch; None where the loss finds it in its micro-batch."""
        rule = self._objective.boundary
        is_only_one = len(scored) * self._ranks.count == 1
        if self._averaged is None and (is_only_one or not isinstance(rule, SatBoundary | M2poBoundary)):
            return None
        scores, masks, sequences, ages, num_sequences = [], [], [], [], 0
        for part in scored:
            logp = self._forward(part.batch).logp
            age = age_of(part.batch, self.version)
            anchor_logp = anchor_of(self._objective, logp, part.behavior_logp, part.old_logp, age)
            scores.append(trust_region_score(self._objective, logp, anchor_logp, part.layout))
            masks.append(part.layout.loss_mask)
            sequences.append(part.layout.sequence + num_sequences)
            ages.append(age)
            num_sequences += part.layout.num_sequences
        layout = Layout(torch.cat(masks), torch.cat(sequences), num_sequences)
        threshold = batch_threshold(self._objective, torch.cat(scores), layout, torch.cat(ages), self._ranks.sum)
        if threshold is None or self._averaged is None or self._quantile_ema is None:
            return threshold
        decay = self._averaged.ema_decay
        return decay * self._quantile_ema + (1 - decay) * threshold

    def _loss(self, part: Scored, forward: Forward, counts: BatchCounts, threshold: Tensor | None) -> LossOutput:
        return policy_loss(
            self._objective,
            logp=forward.logp,
            behavior_logp=part.behavior_logp,
            advantage=part.batch.advantage[part.layout.sequence],
            layout=part.layout,
            counts=counts,
            old_logp=part.old_logp,
            reference_logp=part.reference_logp,
            age=age_of(part.batch, self.version),
            divergence=forward.divergence,
            threshold=threshold,
        )

    def _not_finite(self, scored: Sequence[Scored], counts: BatchCounts, threshold: Tensor | None) -> str:
        """The rollouts whose gradient alone is not finite, by name: rank after rank, while the others run a blank."""
        culprits = []
        rows = [(part, row) for part in scored for row in range(len(part.batch.rollout_ids))]
        for rank, num_rows in enumerate(self._ranks.gather(torch.tensor([len(rows)]))):
            for index in range(int(num_rows)):
                alone = rows[index][0].row(rows[index][1]) if rank == self._ranks.index else scored[0].blank()
                self._optimizer.zero_grad(set_to_none=True)
                forward = self._forward(alone.batch)
                self._loss(alone, forward, counts, threshold).loss.backward()
                gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
                if not self._all_finite(gradients) and rank == self._ranks.index:
                    sampled = alone.batch.loss_mask[0]
                    gap = float((forward.logp.detach() - alone.behavior_logp)[sampled].abs().max())
                    culprits.append(f"rollout of {alone.batch.rollout_ids[0]}, largest |log ratio| {gap:.4g}")
        named = [name for text in gather_texts(self._ranks, "\n".join(culprits)) for name in text.split("\n")]
        return "; ".join(named[:8]) or "no single rollout, only their sum"


def _rows(batch: TrainBatch, flat: Tensor) -> Tensor:
    """[S, W] on the CPU from [S * W]."""
    return flat.view(batch.loss_mask.shape).cpu()
