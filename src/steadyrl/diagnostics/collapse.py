"""At which step a curve of scores collapsed for good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

NOISE_LIMIT = 3.0  # standard deviations of the noise that a fall must exceed as well


def collapse_step(
    steps: Sequence[int],
    scores: Sequence[float],
    drop: float = 0.3,
    patience: int = 3,
    window: int = 3,
    floor: float = 0.0,
) -> int | None:
    """The step from which an evaluation or reward curve stays far below its best; None if there is none.

    Definition. Let x be the scores, each replaced by the median of the `window` scores around it (fewer
    at the ends), and best_i the largest x up to point i. Point i is *down* if

        x_i < best_i - max( drop * (best_i - floor),  3 * noise )

    where noise is the standard deviation of the scores around their trend, from the median size of their
    second differences. The curve has collapsed if its last point is down and so are at least the
    `patience` last points; the step is that of the first point of this last unbroken run of down points.

    So a dip that comes back is no collapse, and neither is a curve that ends in the middle of a fall
    too short to judge: with more points the answer may change either way. A single outlier neither
    makes the best nor the fall. The noise keeps flat, noisy curves, whose best is an accident, from
    being marked, all but about one in fifty. A curve that falls from its first point on is marked like any other.

    Args:
        steps: increasing, one per score.
        scores: NaN for a missing one, which is left out.
        drop: share of the way from `floor` to the best that is lost, in (0, 1].
        patience: down points needed, at least 1.
        window: odd.
        floor: the score of having learned nothing, such as the base model's; a best that is not above
            it cannot be lost.
    """
    if not 0 < drop <= 1 or patience < 1 or window < 1 or window % 2 == 0:
        raise ValueError("drop must be in (0, 1], patience at least 1 and window an odd number")
    points = [(step, score) for step, score in zip(steps, scores, strict=True) if not math.isnan(score)]
    values = [score for _, score in points]
    margin = NOISE_LIMIT * _noise(values)
    best, start = -math.inf, None
    for i, value in enumerate(_smooth(values, window)):
        best = max(best, value)
        is_down = best > floor and value < best - max(drop * (best - floor), margin)
        if not is_down:
            start = None
        elif start is None:
            start = i
    if start is None or len(points) - start < patience:
        return None
    return points[start][0]


def _smooth(values: list[float], window: int) -> list[float]:
    half = window // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _noise(values: list[float]) -> float:
    """Standard deviation around a trend, 0 where there are too few points to tell.

    From second differences, which a steady rise or fall leaves at 0; of independent noise they have sqrt(6) times its
    standard deviation, and the median of their size is 0.6745 times that.
    """
    curvature = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(curvature) / (0.6745 * math.sqrt(6)) if curvature else 0.0
