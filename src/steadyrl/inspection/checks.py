"""Sanity checks of the data: what each fault looks like in numbers, and a verdict in words.

Most rest on one fact. If the engine reports the probabilities it sampled from, then E[e^d] = 1 for any policy on the
trainer's side, however stale, because sum over tokens of mu * (pi / mu) is 1; and e^d - 1 of successive tokens are
uncorrelated, so that the standard error of the mean is the plain one. docs/inspect.md says where the limits come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from steadyrl.inspection.evidence import Evidence
from steadyrl.inspection.rows import CUT_OFF

MIN_TOKENS = 1000  # for the checks that are statistics
RATIO_OFF = (
    0.005  # |E[e^d] - 1| that numerics do not explain: half the variance of d, at its usual 1e-3, is a tenth of it
)
STANDARD_ERRORS = 5.0
ONE_SIDED = 0.6  # share of |d| below 0; symmetric noise gives 0.5 to 0.59
CERTAIN_SHARE = 0.005
SLOPE_OFF = 0.05  # |slope - 1| of trainer on engine; a policy that sharpened by 3 % gives 0.02
EXPLAINED = 0.15  # share of the variance of d that the slope has to explain
SHIFT_MARGIN = 0.1  # by which the correlation at an offset has to beat that in place
COPY_SHARE = 0.999
MASK_SHARE = 0.5  # of responses

State = Literal["good", "bad", "unknown"]


@dataclass(frozen=True)
class Check:
    """One question about the data."""

    name: str
    state: State
    sentence: str


def run_checks(evidence: Evidence, means: Mapping[str, float]) -> list[Check]:
    """All checks, the structural ones first.

    Args:
        evidence: of the whole dump.
        means: pooled `mismatch/...` of all measured tokens; empty where there were none.
    """
    return [
        _rows(evidence),
        _numbers(evidence),
        _above_zero(evidence),
        _masks(evidence),
        _copies(evidence),
        _versions(evidence),
        *_statistics(evidence, means),
    ]


def _rows(e: Evidence) -> Check:
    name = "rows and lengths"
    if not e.unusable and not e.empty:
        return Check(name, "good", f"All {e.rows:,} rows can be read, with lists of equal lengths.")
    parts = []
    if e.unusable:
        kind, _ = e.unusable.most_common(1)[0]
        parts.append(f"{sum(e.unusable.values()):,} of {e.rows:,} rows were left out, such as {e.examples[kind]}")
    if e.empty:
        parts.append(f"{e.empty:,} of {e.rows:,} responses have no token to train on")
    harmless = all(kind.endswith(CUT_OFF) for kind in e.unusable) and e.empty < e.rows
    return Check(name, "good" if harmless else "bad", "; ".join(parts) + ".")


def _numbers(e: Evidence) -> Check:
    if not e.not_finite:
        return Check("numbers", "good", "Every trained token has finite log-probabilities.")
    where = ", ".join(f"{count:,} of the {side}" for side, count in e.not_finite.items())
    return Check(
        "numbers",
        "bad",
        f"Responses with NaN, null, infinities (all beyond float32) or placeholders below -1000 were left out ({where}"
        "): an engine that cannot report a log-probability should fail, because a made-up one trains on noise.",
    )


def _above_zero(e: Evidence) -> Check:
    found = {side: count for side, count in e.above_zero.items() if count}
    if not found:
        return Check("log-probabilities above 0", "good", "None.")
    where = ", ".join(f"{count:,} of the {side}" for side, count in found.items())
    hint = ""
    if any(count > 0.5 * e.active for count in found.values()):
        hint = " Most of them are: these are probabilities, or logits, or negated log-probabilities."
    return Check(
        "log-probabilities above 0", "bad", f"{where} of {e.active:,} tokens: no probability is above 1.{hint}"
    )


def _masks(e: Evidence) -> Check:
    name = "loss mask"
    if not e.mask_testable:
        return Check(name, "unknown", "No response has its prompt in front, so the place of the mask cannot be judged.")
    for count, word in ((e.mask_early, "early"), (e.mask_late, "late")):
        if count >= MASK_SHARE * e.mask_testable:
            return Check(
                name,
                "bad",
                f"On {count / e.mask_testable:.0%} of the responses the mask begins one token too {word} for the "
                "engine's log-probabilities: one of the two lists is shifted by one.",
            )
    return Check(name, "good", f"It begins where the engine's log-probabilities begin ({e.mask_testable:,} responses).")


def _copies(e: Evidence) -> Check:
    if not e.copies:
        return Check("duplicates", "good", "No response comes twice that is too improbable for it (below e^-25).")
    return Check(
        "duplicates",
        "bad",
        f"{e.copies:,} of {e.responses:,} responses are exact copies of earlier ones, log-probabilities included: "
        "written twice, or trained on twice.",
    )


def _versions(e: Evidence) -> Check:
    name = "versions"
    if not e.versions_responses:
        return Check(name, "unknown", "Not recorded.")
    problems = []
    newer = sum(count for age, count in e.ages.items() if age < 0)
    if newer:
        problems.append(f"{newer:,} tokens were sampled by a version that the learner had not reached")
    if e.version_missing:
        problems.append(f"{e.version_missing:,} trained tokens have no version; they are not taken for fresh ones")
    if e.version_backwards:
        problems.append(f"in {e.version_backwards:,} responses a later token has an older version")
    if problems:
        return Check(name, "bad", "; ".join(problems) + ".")
    mixed = f"; {e.version_mixed:,} responses were sampled by several" if e.version_mixed else ""
    return Check(name, "good", f"On every trained token, and never falling within a response{mixed}.")


def _statistics(e: Evidence, means: Mapping[str, float]) -> Iterator[Check]:
    """The checks on d. A fault that makes the next ones meaningless ends the list with `unknown`."""
    names = ("alignment", "independence", "sampling support", "temperature", "mean ratio")
    tokens = e.on_behavior.n
    if tokens < MIN_TOKENS:
        reason = f"{int(tokens):,} tokens have log-probabilities of both sides; {MIN_TOKENS:,} are needed."
        yield from (Check(name, "unknown", reason) for name in names)
        return
    verdicts = (_alignment(e), _independence(means))
    for place, verdict in enumerate(verdicts):
        yield verdict
        if verdict.state == "bad":
            rest = names[place + 1 :]
            yield from (Check(name, "unknown", f"Cannot be judged before {verdict.name} is mended.") for name in rest)
            return
    ratio, z = _ratio(means, tokens)
    support, temperature = _support(e, ratio, z), _temperature(e, ratio, z)
    yield support
    yield temperature
    yield _mean_ratio(ratio, z, explained="bad" in (support.state, temperature.state))


def _alignment(e: Evidence) -> Check:
    in_place = e.shifted_pairs[0].correlation
    best = max((k for k in e.shifted_pairs if k), key=lambda k: _or_less(e.shifted_pairs[k].correlation))
    shifted = e.shifted_pairs[best].correlation
    if _or_less(shifted) > _or_less(in_place) + SHIFT_MARGIN:
        return Check(
            "alignment",
            "bad",
            f"The trainer's log-probabilities agree with the engine's {'next' if best < 0 else 'previous'} token "
            f"(correlation {shifted:.2f}) and not with its own ({in_place:.2f}): one list is shifted by one.",
        )
    return Check("alignment", "good", f"Trainer and engine agree token by token (correlation {in_place:.3f}).")


def _independence(means: Mapping[str, float]) -> Check:
    share = means["mismatch/zero"]
    if share >= COPY_SHARE:
        return Check(
            "independence",
            "bad",
            f"The two log-probabilities are equal to the last bit on {share:.1%} of the tokens. Two implementations "
            "are not: one side is a copy of the other, or was recomputed by the same program with the same weights, "
            "and all that follows is a measurement of nothing.",
        )
    return Check("independence", "good", f"Equal to the last bit on {share:.1%} of the tokens only.")


def _support(e: Evidence, ratio: float, z: float) -> Check:
    """Renormalized over a top-p or top-k set, mu is pi / Z on it: d = log Z <= 0, and E[e^d] is the mass it kept."""
    negative = e.d_negative / (e.d_negative + e.d_positive) if e.d_negative + e.d_positive > 0 else 0.5
    certain = e.certain / e.on_behavior.n
    if ratio < 1 - RATIO_OFF and z < -STANDARD_ERRORS and (negative > ONE_SIDED or certain > CERTAIN_SHARE):
        extra = f"; {certain:.1%} of the tokens are certain (0) for the engine alone" if certain > CERTAIN_SHARE else ""
        return Check(
            "sampling support",
            "bad",
            f"The engine gives its tokens more than the trainer nearly always ({negative:.0%} of the drift is below "
            f"0), and the mean ratio is {ratio:.4f}{extra}: the engine renormalized over a top-p or top-k set that "
            f"kept {ratio:.1%} of the probability, and the trainer did not. Sample with top_p = 1 and top_k off, or "
            "replay the sets in the trainer.",
        )
    return Check("sampling support", "good", f"No sign of top-p or top-k: {negative:.0%} of the drift is below 0.")


def _temperature(e: Evidence, ratio: float, z: float) -> Check:
    slope = 1 + e.on_behavior.slope
    explained = e.on_behavior.correlation**2
    if abs(slope - 1) > SLOPE_OFF and explained > EXPLAINED:
        sharper, flatter = ("trainer", "engine") if slope > 1 else ("engine", "trainer")
        reported = ""
        if ratio > 1 + RATIO_OFF and z > STANDARD_ERRORS:
            reported = (
                f" The mean ratio of {ratio:.3f} says that the engine did not report what it sampled from "
                "(raw log-probabilities, most likely)."
            )
        return Check(
            "temperature",
            "bad",
            f"The trainer's log-probabilities are {slope:.2f} times the engine's (this explains {explained:.0%} of the "
            f"drift): the {sharper}'s distribution is the sharper one, as if it alone were divided by a temperature "
            f"below that of the {flatter}. Use the same temperature on both sides, and the engine's processed "
            f"log-probabilities.{reported}",
        )
    return Check("temperature", "good", f"Trainer against engine has slope {slope:.3f}.")


def _mean_ratio(ratio: float, z: float, explained: bool) -> Check:
    text = f"E[ratio] is {ratio:.4f}, {abs(z):.1f} standard errors from 1"
    if abs(ratio - 1) > RATIO_OFF and abs(z) > STANDARD_ERRORS:
        why = (
            "the finding above explains it"
            if explained
            else "the engine's log-probabilities are not of what it sampled from, or tokens were selected by them"
        )
        return Check("mean ratio", "bad", f"{text}, and should be 1 for any two policies: {why}.")
    return Check("mean ratio", "good", f"{text}.")


def _ratio(means: Mapping[str, float], tokens: float) -> tuple[float, float]:
    """The mean of e^d, and its distance from 1 in standard errors."""
    mean = means["mismatch/weight_token"]
    variance = max(1 + means["mismatch/chi2_token"] - mean**2, 0.0)
    error = math.sqrt(variance / tokens)
    return mean, (mean - 1) / error if error > 0 else 0.0


def _or_less(value: float) -> float:
    return -1.0 if math.isnan(value) else value
