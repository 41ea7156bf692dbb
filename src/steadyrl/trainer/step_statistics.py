"""What one optimizer step has to say, collected over its micro-batches and divided once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadyrl.diagnostics.buckets import bucket_means, by_age, by_position, by_probability, mismatch_by
from steadyrl.diagnostics.mismatch import abs_quantiles, derived, max_abs, mismatch_sums, sequence_sums
from steadyrl.diagnostics.routing import disagreement_sums
from steadyrl.diagnostics.split import split_derived, split_sums
from steadyrl.diagnostics.staleness import lag_extremes, lag_histogram, lag_sums
from steadyrl.models.routing import RoutingReplay
from steadyrl.objective.loss import LossOutput
from steadyrl.objective.rule import Layout
from steadyrl.types import Sums, TrainBatch, add_sums, pooled


@dataclass
class StepStatistics:
    """`add` every micro-batch, then ask for the `pooled` numbers."""

    version: int  # of the policy that was trained
    largest_lag: int
    longest_response: int  # tokens
    splits_mismatch: bool  # old_logp is the score of the weights that sampled
    sums: Sums = field(default_factory=dict)
    breakdowns: Sums = field(default_factory=dict)  # (sum [B], count [B]), a bucket each
    minima: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # logp and behavior_logp of active tokens
    lags: Tensor | None = None

    def add(
        self,
        batch: TrainBatch,
        layout: Layout,
        logp: Tensor,
        old_logp: Tensor | None,
        output: LossOutput,
        replay: RoutingReplay | None,
    ) -> None:
        loss_mask = layout.loss_mask
        behavior_logp, versions = batch.behavior_logp.flatten(), batch.versions.flatten()
        self.tokens.append((logp[loss_mask], behavior_logp[loss_mask]))
        add_sums(self.sums, output.sums)
        add_sums(self.sums, mismatch_sums(logp, behavior_logp, loss_mask))
        add_sums(self.sums, sequence_sums(logp, behavior_logp, layout))
        add_sums(self.sums, lag_sums(self.version, versions, loss_mask))
        if self.splits_mismatch and old_logp is not None:
            add_sums(self.sums, split_sums(logp, old_logp, behavior_logp, loss_mask))
        if replay is not None:
            layers = disagreement_sums(torch.stack(replay.disagreements), torch.stack(replay.tokens))
            add_sums(self.breakdowns, {"routing/disagreement_by_layer": layers["routing/disagreement"]})
        for kind, buckets in {
            "age": by_age(self.version, versions, loss_mask, self.largest_lag),
            "position": by_position(layout, self.longest_response),
            "probability": by_probability(behavior_logp),
        }.items():
            part = mismatch_by(buckets, logp, behavior_logp, loss_mask, shares=output.marks)
            add_sums(self.breakdowns, {f"{name}_by_{kind}": value for name, value in part.items()})
        lowest, highest = lag_extremes(self.version, versions, loss_mask)
        _keep(self.minima, torch.minimum, {**output.extremes, "staleness/lag_min": lowest})
        largest_gap = max_abs(logp, behavior_logp, loss_mask)
        _keep(self.maxima, torch.maximum, {"staleness/lag_max": highest, "mismatch/max_abs": largest_gap})
        lags = lag_histogram(self.version, versions, loss_mask, self.largest_lag)
        self.lags = lags if self.lags is None else self.lags + lags

    def pooled(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Means and extremes by name, and a list by name for what is broken down: lag, age, position, ..."""
        means = pooled(self.sums)
        means |= derived(means)
        if "split/product" in means:
            means |= split_derived(means)
        logp, behavior_logp = (torch.cat(parts) for parts in zip(*self.tokens, strict=True))
        everything = torch.ones_like(logp, dtype=torch.bool)
        single = {**self.minima, **self.maxima, **abs_quantiles(logp, behavior_logp, everything)}
        means |= {name: float(value) for name, value in single.items()}
        assert self.lags is not None
        histograms = {"lag": self.lags.tolist(), **bucket_means(self.breakdowns)}
        if "routing/disagreement_by_layer" in self.breakdowns:
            differing, seen = self.breakdowns["routing/disagreement_by_layer"]
            means["routing/disagreement"] = float(torch.as_tensor(differing).sum() / torch.as_tensor(seen).sum())
        return means, histograms


def _keep(kept: dict[str, Tensor], choose: Callable[[Tensor, Tensor], Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        kept[name] = choose(kept[name], value) if name in kept else value
