"""An exact order statistic, on one device or across ranks.

Floats that are not negative are ordered like the integers of their bits. So the k-th smallest is found digit
by digit: count how often each value of the highest 16 bits occurs, find the one that the k-th value has, and
go on with the next 16 bits of the values that share it. Two counts decide a float32, four a float64. That
reads the values a few times in chunks and copies none of them; ranks exchange counts, never values.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

DIGIT_BITS = 16
DIGITS = 1 << DIGIT_BITS
CHUNK = 1 << 20  # values looked at together; what bounds the extra memory
WEIGHT_UNIT = 2**-40  # weights are counted in this unit


def order_statistic(values: Tensor, loss_mask: Tensor, alpha: float, weights: Tensor | None = None) -> Tensor:
    """q = inf{ x : share of active values <= x is at least alpha } (arXiv 2607.18722, Eq. 14).

    Without weights this is the k-th smallest of the N active values, k = ceil(alpha * N). Nothing is
    interpolated: with an interpolated quantile, more than 1 - alpha of the values can lie above it.

    With weights it is

        q = inf{ x : sum of the weights of active values <= x is at least alpha * (sum of all weights) }

    and the sums are exact: each weight is rounded to a whole number of WEIGHT_UNIT first, so they do not depend
    on the order of the values or on how they are cut. With weights such as 1/3 that rounding could push a sum
    that *equals* alpha * total below it, and q would be one value too large. The comparison therefore grants
    N units (a unit for each value: half for its side of the sum, half for the total). The only other effect is
    that a sum which falls short by less than 2 N * WEIGHT_UNIT counts as reached.

    Args:
        values: [T], floating point, not negative (the sign bit is ignored); NaN is larger than any number.
        loss_mask: [T] bool.
        alpha: in (0, 1], taken as the decimal fraction it is written as.
        weights: [T], from 0 to 1, such as 1 / (tokens of the response); their sum must be below 2^23.

    Returns:
        0-d, detached, dtype of `values`; 0 when no token is active.
    """
    return order_statistic_across(values, loss_mask, alpha, lambda counts: counts, weights)


def order_statistic_across(
    values: Tensor,
    loss_mask: Tensor,
    alpha: float,
    all_reduce: Callable[[Tensor], Tensor],
    weights: Tensor | None = None,
) -> Tensor:
    """`order_statistic` of the values of all ranks together: the same number on every rank.

    Every rank has to call this, one without values too, with the same dtype, alpha and choice of weights.

    Args:
        all_reduce: the sum over the ranks of an int64 tensor, called 2 times (4 for float64) with about
            2^16 counts, however many values there are.
    """
    # a narrower float is exact in float32 and comes back exact
    if values.dtype not in (torch.float32, torch.float64):
        return order_statistic_across(values.float(), loss_mask, alpha, all_reduce, weights).to(values.dtype)
    integer, bits = (torch.int32, 32) if values.dtype == torch.float32 else (torch.int64, 64)
    image = values.detach().view(integer)
    mask = None if bool(loss_mask.all()) else loss_mask
    prefix, rank = 0, 0
    for shift in range(bits - DIGIT_BITS, -1, -DIGIT_BITS):
        is_first = shift == bits - DIGIT_BITS
        counts = all_reduce(_count_digits(image, mask, weights, shift, None if is_first else prefix))
        histogram, num_values = counts[:DIGITS], int(counts[DIGITS])
        if is_first:
            if num_values == 0:
                return values.new_zeros(())
            rank = _rank(int(histogram.sum()), alpha, slack=0 if weights is None else num_values)
        cumulative = histogram.cumsum(0)
        digit = int((cumulative < rank).sum())
        rank -= int(cumulative[digit - 1]) if digit else 0
        prefix = (prefix << DIGIT_BITS) | digit
    return torch.tensor(prefix, dtype=integer, device=values.device).view(values.dtype)


def _rank(total: int, alpha: float, slack: int) -> int:
    """The smallest whole number that is at least alpha * total - slack, and at least 1."""
    # in floating point, 0.9 * N can land just above the integer it stands for, and the rank would be one too large
    share = Fraction(str(alpha))
    return max(-(-share.numerator * total // share.denominator) - slack, 1)


def _count_digits(image: Tensor, mask: Tensor | None, weights: Tensor | None, shift: int, prefix: int | None) -> Tensor:
    """How often each digit follows `prefix` (None: at the front).

    Returns:
        [DIGITS + 1] int64: the count, or the weight, of each digit, and the number of values.
    """
    counts = torch.zeros(DIGITS + 1, dtype=torch.int64, device=image.device)
    for start in range(0, image.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        chunk = image[part]
        weight = None if weights is None else (weights[part].detach().double() / WEIGHT_UNIT).round().long()
        if prefix is None:
            # no value has the digit DIGITS - 1 once its sign is cleared: it takes the masked ones, because
            # filling costs less than selecting
            digits = (chunk >> shift).bitwise_and_((DIGITS - 1) >> 1)
            num_values: Tensor | int = digits.numel()
            if mask is not None:
                digits = digits.masked_fill_(~mask[part], DIGITS - 1)
                num_values = mask[part].sum()
        else:
            above = shift + DIGIT_BITS
            chosen = (chunk >> above).bitwise_and_((1 << (8 * image.element_size() - 1 - above)) - 1) == prefix
            chosen = chosen if mask is None else chosen & mask[part]
            digits = (chunk[chosen] >> shift).bitwise_and_(DIGITS - 1)
            num_values = digits.numel()
            weight = None if weight is None else weight[chosen]
        if weight is None:
            counts[:DIGITS] += torch.bincount(digits, minlength=DIGITS)
        else:
            counts[:DIGITS].index_add_(0, digits, weight)
        counts[DIGITS] += num_values
    if prefix is None:
        counts[DIGITS - 1] = 0
    return counts
