"""The axes of the design space of policy objectives: a table for each rule, correction and rejection. No torch.

`method.py` puts one of each together. A table's defaults are the published setting where there is one;
`docs/objectives.md` has the formulas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AboveZero = Annotated[float, Field(gt=0)]
ZeroOrMore = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]

WHOLE_VOCABULARY = 1 << 30  # asks an engine for every token of its distribution


class Table(BaseModel):
    """A table of a recipe: immutable, and closed against keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_not_one(cls, table: Any) -> Any:
        """TOML has booleans; one in the place of a number is a slip."""
        for name, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name} = {str(value).lower()}: this key does not take a boolean")
        return table


# ---- boundaries: intervals ----


class ClipBoundary(Table):
    """The fixed interval [1 - low, 1 + high] of PPO; `dual` also bounds the loss where A < 0."""

    rule: Literal["clip"] = "clip"
    low: AboveZero = 0.2
    high: AboveZero = 0.2
    dual: AboveOne | None = None  # c of dual clip: for A < 0 the surrogate is at least c A


class SatBoundary(Table):
    """The staleness-adaptive interval: `low` and `high` shrink on the drifted tail of the batch."""

    rule: Literal["sat"] = "sat"
    low: AboveZero = 0.2
    high: AboveZero = 0.2
    alpha: Share = 0.9  # quantile of |log ratio| above which a token is gated
    kernel: Literal["hill", "exp", "exp_continuous", "gauss", "power", "shifted_hill", "const", "zero"] = "hill"
    exponent: AboveZero = 2.0  # of hill, shifted_hill and power
    strength: AboveZero = 1.0  # kappa of exp and exp_continuous; c of const (then at most 1)
    quantile_scope: Literal["batch", "microbatch", "ema", "lag"] = "batch"
    ema_decay: Share = 0.9  # of quantile_scope = "ema"
    quantile_weight: Literal["token", "response"] = "token"  # what counts once in the quantile


# ---- boundaries: hard masks on single tokens, weight min(r, cap) on the rest ----


class BandBoundary(Table):
    """DIS / double-sided masking: a token counts with weight r inside (1 - low, 1 + high), else not at all."""

    rule: Literal["band"] = "band"
    low: AboveZero = 0.3
    high: AboveZero = 5.0


class DppoBoundary(Table):
    """Outward tokens whose divergence from the anchor exceeds a threshold are dropped."""

    rule: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl", "topk_tv", "topk_kl"] = "tv"
    low: AboveZero = 0.15
    high: AboveZero = 0.15
    top_k: Annotated[int, Field(ge=1)] = 20  # tokens of the distribution that topk_* compares
    cap: AboveZero = 20.0  # of the weight min(r, cap)
    clip: AboveZero | None = None  # multiply the mask with PPO's clip of this radius instead of min(r, cap)


class IpoBoundary(Table):
    """|p - p0| above the threshold is dropped whatever the sign of A; the rest counts with weight r."""

    rule: Literal["ipo"] = "ipo"
    threshold: AboveZero = 0.1


class KpopBoundary(Table):
    """Kept while the Bernoulli KL is at most phi in both directions; weight r."""

    rule: Literal["kpop"] = "kpop"
    phi: AboveZero = 0.1


class M2poBoundary(Table):
    """The largest (log r)^2 are dropped until the mean of the rest is below the budget; weight r."""

    rule: Literal["m2po"] = "m2po"
    budget: AboveZero = 0.04


class VacoBoundary(Table):
    """|r - 1| above the bound is dropped, unless the update pulls back; weight min(r, cap)."""

    rule: Literal["vaco"] = "vaco"
    bound: AboveZero = 0.2
    cap: AboveZero = 20.0


class TrpoBoundary(Table):
    """A state-wise gate: outward tokens in states whose exact D_TV exceeds delta are dropped; weight r."""

    rule: Literal["trpo"] = "trpo"
    delta: AboveZero = 0.1


# ---- boundaries: soft ----


class ImportanceBoundary(Table):
    """No boundary: the policy gradient with weight min(r, cap), or with weight 1 (`weighted` = false)."""

    rule: Literal["importance"] = "importance"
    weighted: bool = True
    cap: AboveZero | None = None


class CispoBoundary(Table):
    """The weight is the clipped ratio and never vanishes; low >= 1 means no lower bound."""

    rule: Literal["cispo"] = "cispo"
    low: AboveZero = 1.0
    high: AboveZero = 4.0


class SpoBoundary(Table):
    """A quadratic penalty in the ratio; the optimum is 1 + sign(A) eps."""

    rule: Literal["spo"] = "spo"
    eps: AboveZero = 0.2


class DrpoBoundary(Table):
    """A quadratic penalty weighted by the anchor's probability; the optimum is mu + sign(A) delta."""

    rule: Literal["drpo"] = "drpo"
    delta: AboveZero = 0.15


class SapoBoundary(Table):
    """A sigmoid gate on the ratio with a temperature for each sign of A."""

    rule: Literal["sapo"] = "sapo"
    tau_positive: AboveZero = 1.0
    tau_negative: AboveZero = 1.05


class VespoBoundary(Table):
    """The gamma kernel phi(W) = W^k exp(lambda (1 - W)) on the product ratio."""

    rule: Literal["vespo"] = "vespo"
    k_positive: AboveZero = 2.0
    lambda_positive: AboveZero = 3.0
    k_negative: AboveZero = 3.0
    lambda_negative: AboveZero = 2.0


class UnboundedPositiveBoundary(Table):
    """A > 0: weight 1 and no boundary; A < 0: PPO's clip."""

    rule: Literal["unbounded_positive"] = "unbounded_positive"
    low: AboveZero = 0.2
    high: AboveZero = 0.2


class ToprBoundary(Table):
    """A > 0: weight 1; A < 0: the ratio truncated to [0, 1]."""

    rule: Literal["topr"] = "topr"


Boundary = Annotated[
    ClipBoundary
    | SatBoundary
    | BandBoundary
    | DppoBoundary
    | IpoBoundary
    | KpopBoundary
    | M2poBoundary
    | VacoBoundary
    | TrpoBoundary
    | ImportanceBoundary
    | CispoBoundary
    | SpoBoundary
    | DrpoBoundary
    | SapoBoundary
    | VespoBoundary
    | UnboundedPositiveBoundary
    | ToprBoundary,
    Field(discriminator="rule"),
]


# ---- corrections: a detached weight from k = exp(anchor - behavior) ----


class TisCorrection(Table):
    """Truncated importance sampling: clamp(k, floor, cap), by token, or by the product over a response."""

    kind: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    cap: AboveZero = 2.0
    floor: ZeroOrMore = 0.0


class IcepopCorrection(Table):
    """k where low <= k <= high, else 0."""

    kind: Literal["icepop"] = "icepop"
    low: ZeroOrMore = 0.5
    high: AboveZero = 5.0


class MisCorrection(Table):
    """Masked importance sampling: the product over a response where it lies in [low, high], else 0."""

    kind: Literal["mis"] = "mis"
    low: ZeroOrMore = 0.5
    high: AboveZero = 2.0


class DecoupledCorrection(Table):
    """Decoupled PPO: k as it is, or capped."""

    kind: Literal["decoupled"] = "decoupled"
    cap: AboveZero | None = None


Correction = Annotated[
    TisCorrection | IcepopCorrection | MisCorrection | DecoupledCorrection, Field(discriminator="kind")
]


# ---- rejection of whole responses ----


class GeometricRejection(Table):
    """Keep responses whose geometric mean ratio lies in [low, high]."""

    kind: Literal["geometric"] = "geometric"
    of: Literal["policy", "mismatch"] = "policy"  # logp - anchor, or anchor - behavior
    low: AboveZero = 0.999
    high: AboveZero = 1.001


class K3Rejection(Table):
    """Keep responses whose mean of (k - 1 - log k) is at most `limit`."""

    kind: Literal["k3"] = "k3"
    of: Literal["policy", "mismatch"] = "mismatch"
    limit: AboveZero = 1e-2


class OffPolicyRejection(Table):
    """Drop responses with A < 0 whose mean of anchor - logp exceeds delta (off-policy sequence masking)."""

    kind: Literal["off_policy"] = "off_policy"
    delta: AboveZero = 0.1


class TrustRegionRejection(Table):
    """Trust Region Masking: drop a response if max k2 or mean k3 of its tokens exceeds a limit."""

    kind: Literal["trust_region"] = "trust_region"
    max_k2: AboveZero | None = 0.5
    mean_k3: AboveZero | None = 1e-2


class NegativeVetoRejection(Table):
    """In a response with A < 0, the tokens after the first one whose ratio leaves [1 - eps, 1 + eps]."""

    kind: Literal["negative_veto"] = "negative_veto"
    eps: AboveZero = 0.5


Rejection = Annotated[
    GeometricRejection | K3Rejection | OffPolicyRejection | TrustRegionRejection | NegativeVetoRejection,
    Field(discriminator="kind"),
]
