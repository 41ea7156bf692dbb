"""The four answers in words. Every number in them is one of the findings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steadyrl.diagnostics.buckets import bucket_means
from steadyrl.inspection.rules import RuleTotals
from steadyrl.inspection.study import Findings

ENOUGH = 100  # tokens in a bucket that a sentence may rest on
GROWS = 1.5  # factor from which on a trend is one
FEW = 1e-4  # share of tokens below which a rule did nothing worth a name


@dataclass(frozen=True)
class Answer:
    question: str
    sentences: list[str]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def answers(findings: Findings) -> list[Answer]:
    return [
        Answer("How stale was this run?", _stale(findings)),
        Answer("Where did the mismatch come from?", _origin(findings)),
        Answer("What would each clip rule have cut?", _cuts(findings)),
        Answer("What would SAT have changed?", _sat(findings)),
    ]


def _stale(f: Findings) -> list[str]:
    e = f.evidence
    ages = {age: count for age, count in e.ages.items() if age >= 0}
    if not ages:
        if not e.versions_responses:
            return [
                "The dump does not say which version sampled a token, so the lag is unknown. What follows measures how "
                "far the policies are apart, whatever their age."
            ]
        span = max(newest - oldest for oldest, newest in e.version_spans.values()) if e.version_spans else 0
        return [
            "Versions are recorded, but not the learner's version when it trained (train_version), so the lag is "
            "unknown.",
            f"Within one step the versions are up to {span} apart, and the oldest tokens have at least that lag, in "
            "the unit in which versions are counted.",
        ]
    total = sum(ages.values())
    mean = sum(age * count for age, count in ages.items()) / total
    text = [
        f"Tokens were trained on {mean:.2f} optimizer steps after they were sampled on average, and {max(ages)} at "
        f"most; {ages.get(0, 0) / total:.1%} of {total:,} were fresh."
    ]
    if e.with_age < e.responses:
        text.append(f"{e.responses - e.with_age:,} of {e.responses:,} responses do not say their lag.")
    if e.version_mixed:
        text.append(f"{e.version_mixed:,} responses were sampled by more than one version.")
    return text


def _origin(f: Findings) -> list[str]:
    if not f.means:
        return [
            "Unknown: no response has log-probabilities of the trainer (trainer_logp). They are there once a batch was "
            "trained on."
        ]
    m = f.means
    text = [
        f"The mean |log-ratio| between trainer and engine (d-bar) is {m['mismatch/d_bar']:.4g} over "
        f"{sum(row.tokens for row in f.steps):,} tokens, the KL (k3) {m['mismatch/k3']:.3g}, and the largest "
        f"{max(row.means['mismatch/max_abs'] for row in f.steps):.3g}."
    ]
    text += _split(f) or _by_age(f)
    return text + _by_position(f) + _by_probability(f)


def _split(f: Findings) -> list[str]:
    m = f.means
    if "split/product" not in m:
        return []
    policy, engine, total = (m[f"split/{part}_variance"] for part in ("policy", "engine", "total"))
    part = " (of the steps that have old_logp)" if f.evidence.with_old < f.evidence.responses else ""
    text = [
        f"What training changed has d-bar {m['split/policy_d_bar']:.4g} and what the engine adds on the same weights "
        f"{m['split/engine_d_bar']:.4g}{part}."
    ]
    if total > 0:
        larger = "Training" if policy > engine else "The engine"
        covariance = 2 * m["split/covariance"] / total
        text.append(
            f"{larger} is the larger part: {policy / total:.0%} of the variance is the policy's, {engine / total:.0%} "
            f"the engine's, and {abs(covariance):.0%} is {'hidden' if covariance < 0 else 'added'} by their covariance."
        )
    return text


def _by_age(f: Findings) -> list[str]:
    known = _buckets(f, "age")
    if set(f.evidence.ages) == {0} and f.evidence.with_age == f.evidence.responses:
        return ["Every token was fresh, so all of it is the engine's."]
    if len(known) < 2:
        return [
            "Policy lag and engine cannot be told apart: that takes old_logp (the weights that sampled, scored by the "
            "trainer), or tokens of different lags."
        ]
    (young, low), (old, high) = known[0], known[-1]
    growth = f"It goes from {low:.4g} at lag {young} to {high:.4g} at lag {old}"
    if young == "0":
        share = min(low / f.means["mismatch/d_bar"], 1.0) if f.means["mismatch/d_bar"] > 0 else 1.0
        return [f"{growth}: at lag 0 there is only the engine, which makes about {share:.0%} of it, and age the rest."]
    return [f"{growth}: the rise is age. How much the engine adds cannot be told without tokens of lag 0 or old_logp."]


def _by_position(f: Findings) -> list[str]:
    known = _buckets(f, "position")
    if len(known) < 3 or known[0][1] <= 0:
        return []
    (_, first), (place, last) = known[0], known[-1]
    if last < GROWS * first:
        return []
    return [
        f"It grows along the response, from {first:.4g} on the first token to {last:.4g} on tokens {place}: that is "
        "what an engine's cache or numerics do."
    ]


def _by_probability(f: Findings) -> list[str]:
    sums, counts = map(np.asarray, f.breakdowns["probability"]["d_bar"])
    total, tokens = sums.sum(), counts.sum()
    rare, share = sums[:2].sum(), counts[:2].sum()
    if total <= 0:
        return []
    return [f"Tokens below probability 0.1 are {share / tokens:.0%} of all and make {rare / total:.0%} of it."]


def _cuts(f: Findings) -> list[str]:
    measured = [totals for totals in f.rules if totals.steps]
    if not measured:
        return ["Unknown: no step has log-probabilities of both sides."]
    if not f.has_advantage:
        return [
            "Advantages are not recorded for every response, and whether a token outside the interval loses its "
            "gradient depends on their sign: only the shares outside the interval are given."
        ]
    by_cut = sorted(measured, key=lambda totals: -totals.means()["inspect/no_gradient"])
    text = []
    quiet = [totals.rule.name for totals in by_cut if totals.means()["inspect/no_gradient"] < FEW]
    loud = [totals for totals in by_cut if totals.rule.name not in quiet]
    if loud:
        named = ", ".join(f"{totals.rule.name} {totals.means()['inspect/no_gradient']:.2%}" for totals in loud[:5])
        text.append(f"The largest shares of tokens without a gradient: {named}.")
    if quiet:
        tokens = sum(row.tokens for row in f.steps)
        few = f"none of the {tokens:,} tokens" if tokens * FEW <= 1 else "fewer than one token in ten thousand"
        text.append(f"{len(quiet)} of {len(measured)} rules cut {few}.")
    missing = {totals.missing for totals in f.rules if not totals.steps and totals.missing}
    number = sum(1 for totals in f.rules if not totals.steps)
    if missing:
        text.append(f"{number} rules cannot be answered from this dump: each {' or '.join(sorted(missing))}.")
    return text


def _sat(f: Findings) -> list[str]:
    found = {totals.rule.name: totals for totals in f.rules if totals.steps}
    if "sat-grpo" not in found:
        return ["Unknown: no step has log-probabilities of both sides."]
    text = []
    for name, base in (("sat-grpo", "grpo"), ("sat-gspo", "gspo")):
        text += _sat_against(found[name], found[base], f.has_advantage)
    text += _sat_by_age(f)
    return text


def _sat_against(sat: RuleTotals, base: RuleTotals, has_advantage: bool) -> list[str]:
    m, plain = sat.means(), base.means()
    text = [
        f"{sat.rule.name} would have narrowed the interval on {m['sat/gate_rate']:.2%} of the tokens (q = "
        f"{m['sat/q']:.3g}; mean radii {m['sat/radius_low']:.3f} and {m['sat/radius_high']:.3f} in place of 0.2)"
    ]
    if not has_advantage:
        return [text[0] + "."]
    text[0] += (
        f" and removed the gradient of {m['sat/intervention_rate']:.3%} that {base.rule.name} keeps: "
        f"{m['inspect/signal_cut'] - plain['inspect/signal_cut']:.3%} of the sum of |A|."
    )
    if m["sat/q"] >= math.log(1.2) and m["sat/intervention_rate"] < FEW:
        text.append("The drift is so large that the plain clip already cuts all that SAT would.")
    elif m["sat/q"] == 0:
        text.append("Nine tokens in ten have no drift at all, which turns the gate off.")
    return text


def _sat_by_age(f: Findings) -> list[str]:
    known = _buckets(f, "age", "sat-grpo/intervened")
    if len(known) < 2 or not f.has_advantage:
        return []
    (young, low), (old, high) = known[0], known[-1]
    return [f"By age, sat-grpo steps in on {low:.3%} of the tokens at lag {young} and {high:.3%} at lag {old}."]


def _buckets(f: Findings, kind: str, name: str = "d_bar") -> list[tuple[str, float]]:
    """Label and mean of the buckets with enough tokens, in order."""
    sums = f.breakdowns.get(kind, {})
    if name not in sums:
        return []
    means, counts = bucket_means({name: sums[name]})[name], np.asarray(sums[name][1])
    return [(label, mean) for label, mean, count in zip(f.labels[kind], means, counts, strict=True) if count >= ENOUGH]
