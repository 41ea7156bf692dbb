"""What is gathered about the data itself while it is read: counts and sums, nothing per token is kept."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steadyrl.inspection.response import Response, StepKey

ROUNDING = 1e-4  # a log-probability above it is not one that was rounded
PLACEHOLDER = -1000.0  # no softmax over float32 logits gives less to a token that was sampled
CERTAIN = -0.01  # the trainer's log-probability below which a token that the engine calls certain is not
RARE = -25.0  # total log-probability below which a response does not come twice by chance
OFFSETS = (-1, 0, 1)


@dataclass
class Regression:
    """Sums of pairs (x, y), for the line and the correlation."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        self.n += len(x)
        self.x += float(x.sum())
        self.y += float(y.sum())
        self.xx += float(x @ x)
        self.yy += float(y @ y)
        self.xy += float(x @ y)

    @property
    def slope(self) -> float:
        """Of y on x; NaN where x does not vary."""
        variance = self.n * self.xx - self.x**2
        return (self.n * self.xy - self.x * self.y) / variance if variance > 0 else float("nan")

    @property
    def correlation(self) -> float:
        """Of x and y; NaN where one does not vary."""
        x, y = self.n * self.xx - self.x**2, self.n * self.yy - self.y**2
        return (self.n * self.xy - self.x * self.y) / (x * y) ** 0.5 if x > 0 and y > 0 else float("nan")


@dataclass
class Evidence:
    """`left_out` a row that is no response, `add` every other; then read the fields."""

    rows: int = 0
    unusable: Counter[str] = field(default_factory=Counter)  # reason, numbers left open -> rows
    examples: dict[str, str] = field(default_factory=dict)  # the first row of each reason
    empty: int = 0  # responses without a token to train on
    responses: int = 0  # with one
    active: int = 0  # their tokens
    untrained: int = 0  # without log-probabilities of the trainer
    not_finite: Counter[str] = field(default_factory=Counter)  # side -> responses
    above_zero: Counter[str] = field(default_factory=Counter)  # side -> tokens
    certain: int = 0  # tokens that only the engine calls certain
    d_negative: float = 0.0  # sum of max(-d, 0)
    d_positive: float = 0.0
    shifted_pairs: dict[int, Regression] = field(default_factory=lambda: {k: Regression() for k in OFFSETS})
    on_behavior: Regression = field(default_factory=Regression)  # d on behavior_logp
    mask_testable: int = 0  # responses after a prompt
    mask_early: int = 0  # the mask begins, and ends, one token too early
    mask_late: int = 0
    versions_responses: int = 0
    version_missing: int = 0  # tokens without a version where others have one
    version_backwards: int = 0  # responses whose version falls along the way
    version_mixed: int = 0  # responses sampled by several versions
    version_spans: dict[StepKey, tuple[int, int]] = field(default_factory=dict)  # oldest and newest of each step
    ages: Counter[int] = field(default_factory=Counter)  # lag -> tokens
    with_advantage: int = 0
    with_old: int = 0
    with_age: int = 0
    no_advantage_tokens: int = 0  # A = 0
    rewards: tuple[float, int] = (0.0, 0)
    _copies: array[int] = field(default_factory=lambda: array("q"))

    def left_out(self, reason: str) -> None:
        self.rows += 1
        kind = re.sub(r"\d+", "N", reason)
        self.unusable[kind] += 1
        self.examples.setdefault(kind, reason)

    def add(self, response: Response) -> bool:
        """Whether the response can be measured: it has tokens to train on, and numbers for all of them."""
        self.rows += 1
        active = response.loss_mask
        if not active.any():
            self.empty += 1
            return False
        behavior = response.behavior_logp[active]
        sides = {"engine": behavior}
        if response.trainer_logp is not None:
            sides["trainer"] = response.trainer_logp[active]
        if response.old_logp is not None:
            sides["old"] = response.old_logp[active]
        broken = [name for name, logp in sides.items() if not (np.isfinite(logp) & (logp > PLACEHOLDER)).all()]
        if response.advantage is not None and not np.isfinite(response.advantage[active]).all():
            broken.append("advantage")
        for name in broken:
            self.not_finite[name] += 1
        if broken:
            return False
        self.responses += 1
        self.active += int(active.sum())
        for name, logp in sides.items():
            self.above_zero[name] += int((logp > ROUNDING).sum())
        self._mask(response)
        self._versions(response)
        identity = response.identity
        if identity is not None and float(behavior.sum(dtype=np.float64)) < RARE:
            self._copies.append(int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big", signed=True))
        if response.reward is not None:
            self.rewards = (self.rewards[0] + response.reward, self.rewards[1] + 1)
        if response.trainer_logp is None:
            self.untrained += 1
            return False
        self._pairs(behavior.astype(np.float64), sides["trainer"].astype(np.float64))
        self.with_old += response.old_logp is not None
        if response.advantage is not None:
            self.with_advantage += 1
            self.no_advantage_tokens += int((response.advantage[active] == 0).sum())
        return True

    @property
    def copies(self) -> int:
        """Responses that had been there before, of those too improbable to come twice."""
        return len(self._copies) - len(np.unique(np.asarray(self._copies)))

    def _pairs(self, behavior: NDArray[np.float64], trainer: NDArray[np.float64]) -> None:
        d = trainer - behavior
        self.d_negative += float(np.maximum(-d, 0).sum())
        self.d_positive += float(np.maximum(d, 0).sum())
        self.certain += int(((behavior == 0) & (trainer < CERTAIN)).sum())
        self.on_behavior.add(behavior, d)
        n = len(d)
        for offset, pairs in self.shifted_pairs.items():
            pairs.add(behavior[max(0, -offset) : n - max(0, offset)], trainer[max(0, offset) : n - max(0, -offset)])

    def _mask(self, response: Response) -> None:
        """The engine's list is 0 where nothing was sampled: a moved mask covers one such 0 and misses a number."""
        places = np.flatnonzero(response.loss_mask)
        first, last = int(places[0]), int(places[-1])
        if first < 2:
            return
        logp = response.behavior_logp
        self.mask_testable += 1
        after = logp[last + 1] if last + 1 < len(logp) else 0.0
        self.mask_early += bool(logp[first] == 0 and after != 0)
        self.mask_late += bool(logp[first - 1] != 0 and logp[first - 2] == 0)

    def _versions(self, response: Response) -> None:
        if response.versions is None:
            return
        versions = response.versions[response.loss_mask]
        self.versions_responses += 1
        self.version_missing += int((versions < 0).sum())
        known = versions[versions >= 0]
        self.version_backwards += bool((np.diff(known) < 0).any())
        if not len(known):
            return
        oldest, newest = int(known.min()), int(known.max())
        self.version_mixed += oldest != newest
        low, high = self.version_spans.get(response.step, (oldest, newest))
        self.version_spans[response.step] = min(low, oldest), max(high, newest)
        if response.train_version is not None:
            self.with_age += 1
            ages, counts = np.unique(response.train_version - known, return_counts=True)
            self.ages.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
