"""The family of objectives as a table: what each preset measures, bounds, keeps and needs. No torch.

Numbers, units, anchors and needs come from `ObjectiveConfig`; a configuration does not know what its rule
measures, which way it acts and who published it, so that is written down here, once for each rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from steadyrl.axes import (
    WHOLE_VOCABULARY,
    ClipBoundary,
    Correction,
    DppoBoundary,
    ImportanceBoundary,
    Rejection,
    SatBoundary,
)
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.presets import PRESETS

RATIO = {"token": "r", "sequence": "rho", "sequence_token": "rho", "product": "W"}


@dataclass(frozen=True)
class Facts:
    """What a rule is, in the words of the table. `{x}` stands for the ratio, `{name}` for a value of the rule."""

    discriminator: str  # what is measured
    constraint: str  # what it may be
    weight: str  # the coefficient of A grad log p that is left
    direction: str  # which updates it can stop
    source: str  # arXiv number, or a name
    variant: str = ""  # how it goes beyond what the source gives


RULES: dict[str, Facts] = {
    "clip": Facts("|{x} - 1|", "{x} in [{lower:.5g}, {upper:.5g}]", "{x} or 0", "outward", "1707.06347"),
    "sat": Facts(
        "|{x} - 1|, |log {x}|",
        "{x} in [1 - {low:g} c, 1 + {high:g} c], c = {kernel} at q{alpha:g} of {quantile_scope}",
        "{x} or 0",
        "outward, adaptive",
        "2607.18722",
    ),
    "band": Facts(
        "{x}", "{lower:.4g} < {x} < {upper:g}", "{x} or 0", "both", "2607.07508", "that the weight is detached"
    ),
    "dppo": Facts("", "", "min({x}, {cap:g}) or 0", "outward", "2602.04879"),
    "ipo": Facts("|p - p0|", "<= {threshold:g}", "{x} or 0", "both", "prime-rl"),
    "kpop": Facts("Bernoulli KL, both ways", "<= {phi:g}", "{x} or 0", "both", "2607.18722 App. E"),
    "m2po": Facts(
        "(log {x})^2", "mean of the kept < {budget:g}", "{x} or 0", "both", "2510.01161", "ties are dropped together"
    ),
    "vaco": Facts(
        "|{x} - 1|",
        "<= {bound:g}",
        "min({x}, {cap:g}) or 0",
        "outward",
        "2603.01365",
        "the mask alone, without the realigned advantages; the bound is ours",
    ),
    "trpo": Facts(
        "D_TV of the state",
        "<= {delta:g}",
        "{x} or 0",
        "outward",
        "1502.05477",
        "a gate on single states in place of the constrained step",
    ),
    "importance": Facts("-", "none", "{x}", "-", "REINFORCE"),
    "cispo": Facts("{x}", "weight in [{floor:.4g}, {upper:g}]", "clip({x})", "weight only", "2506.13585"),
    "spo": Facts("{x}", "optimum 1 + sign(A) {eps:g}", "soft", "outward", "2401.16025"),
    "drpo": Facts(
        "|p - p0|", "optimum p0 + sign(A) {delta:g}", "soft", "outward", "2606.09821", "the default of delta is ours"
    ),
    "sapo": Facts("{x}", "tau {tau_positive:g} / {tau_negative:g}", "soft", "both", "2511.20347"),
    "vespo": Facts(
        "{x}",
        "k {k_positive:g} / {k_negative:g}, lambda {lambda_positive:g} / {lambda_negative:g}",
        "phi({x})",
        "both",
        "2602.10693",
    ),
    "unbounded_positive": Facts(
        "|{x} - 1|",
        "A < 0: {x} in [{lower:g}, {upper:g}]",
        "1, or clip for A < 0",
        "A < 0",
        "2607.06987",
        "details of the clip",
    ),
    "topr": Facts(
        "{x}",
        "A < 0: weight in [0, 1]",
        "1, or min({x}, 1) for A < 0",
        "A < 0",
        "2503.14286",
        "the unit and the truncation",
    ),
}

DPPO = {  # discriminator of each divergence
    "tv": "p - p0",
    "kl": "Bernoulli KL(p0, p)",
    "topk_tv": "D_TV on the top-K bins",
    "topk_kl": "D_KL on the top-K bins",
}

UNIT_SOURCES = {"sequence": "2507.18071", "sequence_token": "2507.18071"}
ANCHOR_SOURCES = {"prox_approx": "2512.06547"}
CORRECTIONS = {  # constraint, weight, source
    "tis": ("k <= {cap:g}", "min(k, {cap:g})", "Yao et al. 2025"),
    "icepop": ("k in [{low:g}, {high:g}]", "k or 0", "2510.18855"),
    "mis": ("K in [{low:g}, {high:g}]", "K or 0", "verl"),
    "decoupled": ("", "k", "2505.24298"),
}
REJECTIONS = {  # constraint, source, how it goes beyond the source
    "geometric": ("response: {x} in [{low:g}, {high:g}]", "2607.18722 App. E", ""),
    "k3": ("mean k3 <= {limit:g}", "verl", ""),
    "off_policy": ("A < 0: mean drift <= {delta:g}", "2512.02556", ""),
    "trust_region": ("{limits}", "2512.23075", "estimates from the sampled tokens in place of exact divergences"),
    "negative_veto": (
        "A < 0: nothing after |r - 1| > {eps:g}",
        "2605.17570",
        "the source names neither the threshold nor its side",
    ),
}
AGGREGATION_SOURCES = {"constant": "2503.20783"}
PRESET_SOURCES = {
    "grpo": "2402.03300",
    "dapo": "2503.14476",
    "dppo-sat-paper": "2607.18722 App. F",
    "tis-pg": "2607.18722 Eq. 41",
}


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    unit: str
    anchor: str
    discriminator: str
    constraint: str
    weight: str
    direction: str
    needs: str
    source: str
    variant: str  # why this is "our variant", or nothing


def methods() -> list[Method]:
    """Every preset, in the order of `presets.py`."""
    return [method(ObjectiveConfig.model_validate(name)) for name in PRESETS]


def method(objective: ObjectiveConfig) -> Method:
    """The row of an objective; a preset whose values were changed keeps its name."""
    facts, values = RULES[objective.boundary.rule], _values(objective)
    weights = [_weight(objective, values)]
    if objective.correction is not None:
        weights.append(_correction(objective.correction)[1])
    return Method(
        name=objective.preset or "custom",
        unit=objective.unit,
        anchor=objective.anchor,
        discriminator=_discriminator(objective, values),
        constraint="; ".join(_constraints(objective, values)),
        weight=" * ".join(f"({part})" if len(weights) > 1 and " or " in part else part for part in weights),
        direction=facts.direction,
        needs=", ".join(needs(objective)),
        source=", ".join(_sources(objective)),
        variant="; ".join(variants(objective)),
    )


def needs(objective: ObjectiveConfig) -> list[str]:
    """What a trainer has to bring along for an objective, beside its own log-probabilities."""
    policy_mismatch = any(getattr(rejection, "of", "policy") == "mismatch" for rejection in objective.reject)
    wanted = {
        "rollout log-probs": objective.anchor in ("rollout", "prox_approx")
        or objective.correction is not None
        or policy_mismatch,
        "trainer recompute": objective.needs_old_logp,
        "versions": objective.anchor == "prox_approx"
        or (isinstance(objective.boundary, SatBoundary) and objective.boundary.quantile_scope == "lag"),
        _distributions(objective.num_top_logprobs): objective.num_top_logprobs != 0,
    }
    return [name for name, needed in wanted.items() if needed]


def _distributions(count: int) -> str:
    return "distributions" if count == WHOLE_VOCABULARY else f"distributions (top {count})"


def variants(objective: ObjectiveConfig) -> list[str]:
    """How an objective goes beyond what its sources give exactly; empty where it follows them."""
    rule, found = objective.boundary, []
    if objective.unit == "product" and isinstance(rule, ClipBoundary):
        found.append("the clip on the product of a response's ratios, the sequence as one action")
    if RULES[rule.rule].variant:
        found.append(RULES[rule.rule].variant)
    if isinstance(rule, SatBoundary):
        if rule.kernel != "hill":
            found.append(f"the paper has the Hill kernel alone, not {rule.kernel}")
        if rule.quantile_scope == "ema":
            found.append("a quantile smoothed over steps")
        if rule.quantile_scope == "lag":
            found.append("a quantile for each lag")
        if rule.quantile_weight == "response":
            found.append("the quantile counts responses")
    return found + [REJECTIONS[rejection.kind][2] for rejection in objective.reject if REJECTIONS[rejection.kind][2]]


COLUMNS = ("unit", "anchor", "discriminator", "constraint", "weight", "direction", "needs", "source")
NARROW_COLUMNS = ("unit", "constraint", "direction")


def table(columns: Sequence[str] = COLUMNS) -> Table:
    """All presets for the terminal; all columns take some 190 characters."""
    rows = methods()
    result = Table(
        title=f"{len(rows)} objectives; choose one with objective=NAME",
        caption="r token ratio, rho geometric mean of a response, W its product, k trainer against engine, K its "
        "product over a response, p and p0 probabilities, q quantile of |log ratio|. outward: only updates that push "
        "the ratio further from 1 are stopped. * our variant: the source does not give it exactly. Numbers are arXiv "
        "numbers. Formulas: docs/objectives.md",
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("name", no_wrap=True, style="bold")
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(row.name + ("*" if row.variant else ""), *(getattr(row, column) for column in columns))
    return result


def draw(folder: Path) -> list[Path]:
    """Figures of every boundary rule.

    Raises:
        ConfigError: if matplotlib is not installed, or `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: say where the figures go with --plot FOLDER")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError('figures need matplotlib: pip install "steadyrl[report]"') from None
    from steadyrl.reports.method_figures import write_figures

    return write_figures(folder)


def _values(objective: ObjectiveConfig) -> dict[str, Any]:
    """What the templates of a rule may name."""
    values = objective.boundary.model_dump()
    low, high = values.get("low"), values.get("high")
    if isinstance(low, float) and isinstance(high, float):
        values |= {"lower": 1 - low, "upper": 1 + high, "floor": max(1 - low, 0.0)}
    return values | {"x": RATIO[objective.unit]}


def _discriminator(objective: ObjectiveConfig, values: dict[str, Any]) -> str:
    rule = objective.boundary
    if isinstance(rule, DppoBoundary):
        return DPPO[rule.divergence]
    return RULES[rule.rule].discriminator.format(**values)


def _constraints(objective: ObjectiveConfig, values: dict[str, Any]) -> list[str]:
    rule = objective.boundary
    found = [RULES[rule.rule].constraint.format(**values)]
    if isinstance(rule, DppoBoundary):
        limits = f"{rule.low:g}" if rule.low == rule.high else f"{rule.low:g} / {rule.high:g}"
        found = [f"<= {limits}"] + ([f"r in [{1 - rule.clip:g}, {1 + rule.clip:g}]"] if rule.clip else [])
    if values.get("dual"):
        found.append(f"A < 0: S >= {values['dual']:g} A")
    if objective.correction is not None:
        found.append(_correction(objective.correction)[0])
    return [part for part in found if part] + [_rejection(rejection)[0] for rejection in objective.reject]


def _weight(objective: ObjectiveConfig, values: dict[str, Any]) -> str:
    rule = objective.boundary
    if isinstance(rule, ImportanceBoundary) and not rule.weighted:
        return "1"
    if isinstance(rule, ImportanceBoundary) and rule.cap:
        return f"min({values['x']}, {rule.cap:g})"
    if isinstance(rule, DppoBoundary) and rule.clip:
        return f"{values['x']} or 0"
    return RULES[rule.rule].weight.format(**values)


def _correction(correction: Correction) -> tuple[str, str, str]:
    """Constraint, weight and source of a correction; the ratio of a whole response is K."""
    constraint, weight, source = (part.format(**correction.model_dump()) for part in CORRECTIONS[correction.kind])
    cap = getattr(correction, "cap", None)
    if correction.kind == "decoupled" and cap is not None:
        weight = f"min(k, {cap:g})"
    if getattr(correction, "level", "token") == "sequence":
        constraint, weight = constraint.replace("k", "K"), weight.replace("k", "K")
    if getattr(correction, "floor", 0.0):
        constraint = f"{correction.model_dump()['floor']:g} <= {constraint}"
    return constraint, weight, source


def _rejection(rejection: Rejection) -> tuple[str, str]:
    """Constraint and source of a rejection."""
    values = rejection.model_dump()
    x = "rho" if values.get("of", "policy") == "policy" else "geometric mean of k"
    limits = [f"{text} <= {values[name]:g}" for name, text in TRUST_REGION.items() if values.get(name) is not None]
    constraint, source, _ = REJECTIONS[rejection.kind]
    return constraint.format(x=x, limits=", ".join(limits), **values), source


TRUST_REGION = {"max_k2": "max k2", "mean_k3": "mean k3"}


def _sources(objective: ObjectiveConfig) -> list[str]:
    """Where the parts come from, the most particular first."""
    found = [_rejection(rejection)[1] for rejection in objective.reject]
    if objective.preset in PRESET_SOURCES:
        found.append(PRESET_SOURCES[objective.preset])
    if isinstance(objective.boundary, ClipBoundary) and objective.boundary.dual:
        found.append("1912.09729")
    if objective.correction is not None:
        found.append(_correction(objective.correction)[2])
    for source in (
        ANCHOR_SOURCES.get(objective.anchor),
        UNIT_SOURCES.get(objective.unit),
        AGGREGATION_SOURCES.get(objective.aggregation),
        RULES[objective.boundary.rule].source,
    ):
        if source:
            found.append(source)
    return list(dict.fromkeys(found))
