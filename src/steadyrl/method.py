"""The design space of policy objectives, described: one table for each axis. No torch.

    anchor       the policy that the ratio is taken against
    unit         what one ratio belongs to: a token, a response
    boundary     where the surrogate stops pushing, or how it fades
    correction   a detached weight for the mismatch between trainer and engine
    reject       whole responses that are left out
    aggregation  how the terms of the tokens become one number
    advantage    from rewards to advantages
    penalty      kl_coef, log_ratio_coef

`objective/loss.py` is where they meet; `docs/objectives.md` has a row for every named combination.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steadyrl.axes import (
    WHOLE_VOCABULARY,
    Boundary,
    ClipBoundary,
    Correction,
    DppoBoundary,
    DrpoBoundary,
    GeometricRejection,
    IcepopCorrection,
    ImportanceBoundary,
    IpoBoundary,
    KpopBoundary,
    MisCorrection,
    Rejection,
    SatBoundary,
    Table,
    TisCorrection,
    TrpoBoundary,
    TrustRegionRejection,
    UnboundedPositiveBoundary,
    VespoBoundary,
    ZeroOrMore,
)
from steadyrl.presets import PRESETS


class ObjectiveConfig(Table):
    """One point of the design space: each axis chosen by name."""

    preset: str | None = None  # where the values started from; overrides apply on top
    # rollout: the engine's log-probabilities. old_actor: the trainer's, with the weights that sampled.
    # step_start: the trainer's, with the weights before this batch. prox_approx: between engine and trainer by age.
    anchor: Literal["rollout", "old_actor", "step_start", "prox_approx"] = "rollout"
    unit: Literal["token", "sequence", "sequence_token", "product"] = "token"
    boundary: Boundary = ClipBoundary()
    correction: Correction | None = None
    reject: tuple[Rejection, ...] = ()
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    aggregation_tokens: Annotated[int, Field(ge=1)] | None = None  # tokens of a response, for "constant"
    advantage: Literal["group_standardized", "group_centered"] = "group_standardized"
    kl_coef: ZeroOrMore = 1e-3  # k3 penalty towards the starting weights; 0 = no reference model
    log_ratio_coef: ZeroOrMore = 0.0  # tau (log r)^2 against the anchor

    def describe(self) -> str:
        """The objective in a line, with the values that overrides may have changed."""
        rule = self.boundary
        values = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in rule.model_dump(exclude={"rule"}, exclude_none=True).items()
        )
        parts = [f"{self.unit} ratio against {self.anchor}", f"{rule.rule} ({values})" if values else rule.rule]
        if self.correction is not None:
            parts.append(f"{self.correction.kind} correction")
        parts += [f"{rejection.kind} rejection" for rejection in self.reject]
        parts += [self.aggregation, f"KL coefficient {self.kl_coef:g}"]
        return f"{self.preset or 'custom'}: {', '.join(parts)}"

    @property
    def needs_old_logp(self) -> bool:
        """Whether the trainer has to score the batch with weights that are not the current ones."""
        return self.anchor in ("old_actor", "step_start")

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens the engine has to report with each sampled one."""
        rule = self.boundary
        if isinstance(rule, TrpoBoundary):
            return WHOLE_VOCABULARY
        return rule.top_k if isinstance(rule, DppoBoundary) and rule.divergence.startswith("topk") else 0

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"preset": value}
        if not isinstance(value, dict):
            return value
        preset: dict[str, Any] = {}
        if value.get("preset") is not None:
            name = value["preset"]
            if not isinstance(name, str):
                raise ValueError(f"a preset is given by its name, not as {name!r}")
            if name not in PRESETS:
                known = ", ".join(PRESETS)
                raise ValueError(f"no objective is called {name!r}{nearest(name, PRESETS)}; there are: {known}")
            preset = PRESETS[name]
        merged = {**preset, **value}
        for axis, tag, default in (("boundary", "rule", "clip"), ("correction", "kind", "tis")):
            chosen = value.get(axis)
            if isinstance(chosen, dict):
                base = preset.get(axis, {tag: default})
                same = chosen.get(tag, base[tag]) == base[tag]
                merged[axis] = {**base, **chosen} if same else chosen
        if value.get("aggregation", "constant") != "constant" and "aggregation_tokens" not in value:
            merged.pop("aggregation_tokens", None)  # the preset's number belongs to the preset's aggregation
        return merged

    @model_validator(mode="after")
    def _combinations(self) -> ObjectiveConfig:
        for problem in (*self._boundary_problems(), *self._mismatch_problems(), *self._other_problems()):
            raise ValueError(problem)
        return self

    def _boundary_problems(self) -> Iterator[str]:
        rule = self.boundary
        if isinstance(rule, (DppoBoundary, IpoBoundary, KpopBoundary, DrpoBoundary, TrpoBoundary)):
            if self.unit != "token":
                yield (
                    f"the rule {rule.rule!r} compares the probabilities of single tokens, and unit = {self.unit!r} "
                    "has none: set objective.unit=token"
                )
            if self.num_top_logprobs != 0 and self.anchor != "rollout":
                yield (
                    f"the divergence of {rule.rule!r} is measured against what the engine sampled from, and "
                    f"anchor = {self.anchor!r} is another policy: set objective.anchor=rollout"
                )
        if isinstance(rule, VespoBoundary) and self.unit != "product":
            yield (
                f"the kernel of 'vespo' is made for the product of a response's ratios, not for unit = {self.unit!r}: "
                "set objective.unit=product"
            )
        if isinstance(rule, UnboundedPositiveBoundary) and self.unit == "product":
            yield (
                "'unbounded_positive' gives weight 1 to every token where A > 0, and with unit = 'product' it would "
                "grow with the length of the response: set objective.unit to token or sequence"
            )
        if isinstance(rule, SatBoundary) and rule.kernel == "const" and rule.strength > 1:
            yield (
                f"the const kernel with strength {rule.strength:g} would widen the interval: "
                "set objective.boundary.strength to 1 or less"
            )
        if isinstance(rule, ClipBoundary) and rule.dual is not None and rule.dual <= 1 + rule.high:
            yield (
                f"dual clip at {rule.dual:g} would cut inside the interval that ends at {1 + rule.high:g}: "
                "set objective.boundary.dual above 1 + high"
            )
        if isinstance(rule, ImportanceBoundary) and not rule.weighted and rule.cap is not None:
            yield "without a weight there is nothing to cap: set objective.boundary.weighted=true, or leave out the cap"

    def _mismatch_problems(self) -> Iterator[str]:
        """What compares the anchor with the engine needs an anchor that is not the engine."""
        correction = self.correction
        if correction is not None and self.anchor == "rollout":
            yield (
                f"a {correction.kind} correction goes from the anchor to the engine, and with anchor = 'rollout' the "
                "ratio already does: every weight would be exactly 1, and any other would count the mismatch twice. "
                "Set objective.anchor=old_actor, or choose an objective without a correction"
            )
        if self.anchor == "rollout" and any(getattr(rejection, "of", "") == "mismatch" for rejection in self.reject):
            yield (
                "a rejection with of = 'mismatch' compares the anchor with the engine, and with anchor = 'rollout' "
                "they are the same, so nothing is ever rejected: set objective.anchor=old_actor, or of = 'policy'"
            )
        if isinstance(correction, (IcepopCorrection, MisCorrection)) and not correction.low <= 1 <= correction.high:
            yield (
                f"the range [{correction.low:g}, {correction.high:g}] of the {correction.kind} correction leaves out "
                "1, the weight of a token without mismatch: set low <= 1 <= high"
            )
        if isinstance(correction, TisCorrection) and correction.floor > correction.cap:
            yield (
                f"the tis correction cannot keep weights above {correction.floor:g} and below {correction.cap:g}: "
                "set objective.correction.floor below objective.correction.cap"
            )

    def _other_problems(self) -> Iterator[str]:
        for rejection in self.reject:
            if isinstance(rejection, TrustRegionRejection) and rejection.max_k2 is None and rejection.mean_k3 is None:
                yield "a trust_region rejection without a limit rejects nothing: set max_k2, mean_k3 or both"
            if isinstance(rejection, GeometricRejection) and not rejection.low <= 1 <= rejection.high:
                yield (
                    f"the range [{rejection.low:g}, {rejection.high:g}] of the geometric rejection leaves out 1, "
                    "the ratio of a response that nothing is wrong with: set low <= 1 <= high"
                )
        kinds = [rejection.kind for rejection in self.reject]
        for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            yield f"there are two {kind} rejections, and their shares are reported under one name: leave out one"
        if self.aggregation == "constant" and self.aggregation_tokens is None:
            yield (
                "aggregation = 'constant' divides by a number of tokens: set objective.aggregation_tokens, "
                "for example to sampling.max_response_tokens"
            )
        if self.aggregation != "constant" and self.aggregation_tokens is not None:
            yield (
                f"aggregation_tokens has no effect with aggregation = {self.aggregation!r}: leave it out, "
                "or set objective.aggregation=constant"
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that looks most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
