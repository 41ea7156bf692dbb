"""One recorded response, whatever wrote it down, and how a row of a file becomes one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]
MOST = 2**31 - 1  # of a version or a step; differences of two are kept in 32 bits

StepKey = tuple[str, int]
"""What tells optimizer steps apart: ("step", number) where the file says so, else ("file", its place)."""


class BadRow(ValueError):
    """A row that cannot be used; the message says why, for the list of what was left out."""


@dataclass(frozen=True)
class Response:
    """A prompt and what was sampled after it. n is the number of tokens in all lists; None is "not recorded"."""

    step: StepKey
    loss_mask: NDArray[np.bool_]  # [n], true on the tokens that are trained on
    behavior_logp: NDArray[np.float32]  # [n], of the engine
    trainer_logp: NDArray[np.float32] | None = None  # [n], of the policy that is trained
    old_logp: NDArray[np.float32] | None = None  # [n], of the weights that sampled, scored by the trainer
    advantage: NDArray[np.float32] | None = None  # [n]
    versions: NDArray[np.int32] | None = None  # [n], -1 where unknown
    train_version: int | None = None  # of the learner before the step that used this response
    token_ids: NDArray[np.int64] | None = None  # [n]
    reward: float | None = None

    @property
    def identity(self) -> bytes | None:
        """The same for two copies of one response and, in practice, for nothing else."""
        if self.token_ids is None:
            return None
        return self.token_ids.tobytes() + self.behavior_logp[self.loss_mask].tobytes()


def column(row: Row, name: str, dtype: Any, n: int | None = None) -> NDArray[Any] | None:
    """A list of the row as an array of `dtype`; None if it is missing or null.

    In a list of floats, null is NaN, and what is beyond the dtype infinite.

    Raises:
        BadRow: it is no list of numbers, not one of n, or not one of whole numbers where `dtype` has only these.
    """
    value = row.get(name)
    if value is None:
        return None
    try:
        if hasattr(value, "detach"):  # a torch tensor, possibly bfloat16, which numpy does not know
            value = value.detach().float().numpy() if value.is_floating_point() else value.detach().numpy()
        array = np.asarray(value)
        if array.dtype == object and all(one is None or isinstance(one, int | float) for one in array.flat):
            array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise BadRow(f"{name} is not a list of numbers") from None
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise BadRow(f"{name} is not a list of numbers")
    if n is not None and len(array) != n:
        raise BadRow(f"{name} has {len(array)} entries for {n} tokens")
    if np.issubdtype(dtype, np.integer):
        _check_whole(name, array, np.iinfo(dtype))
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def needed(row: Row, name: str, dtype: Any, n: int | None = None) -> NDArray[Any]:
    """`column` where nothing can be said without it."""
    array = column(row, name, dtype, n)
    if array is None:
        raise BadRow(f"there is no {name}")
    return array


def mask(row: Row, name: str, n: int | None = None) -> NDArray[np.bool_]:
    """A list of 0 and 1, or of false and true."""
    values = needed(row, name, np.float64, n)
    if not np.isin(values, (0, 1)).all():
        raise BadRow(f"{name} has entries other than 0 and 1")
    return values.astype(bool)


def advantages(row: Row, name: str, n: int) -> NDArray[np.float32] | None:
    """One number for the whole response, or one for each token; see `column`."""
    value = _plain(row.get(name))
    if isinstance(value, int | float):
        try:
            with np.errstate(over="ignore"):
                return np.full(n, value, np.float32)
        except OverflowError:
            raise BadRow(f"{name} is beyond all floats") from None
    return column(row, name, np.float32, n)


def number(row: Row, name: str) -> float | None:
    """A finite number; None if it is missing or null.

    Raises:
        BadRow: it is anything else.
    """
    value = _plain(row.get(name))
    if value is None:
        return None
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond all floats
        pass
    raise BadRow(f"{name} is not a finite number")


def whole(row: Row, name: str) -> int | None:
    """A whole number from 0 to `MOST`, also as 6.0; None if it is missing or null.

    Raises:
        BadRow: it is anything else.
    """
    value = _plain(row.get(name))
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST and value == int(value):
        return int(value)
    raise BadRow(f"{name} is not a whole number from 0 to {MOST:,}")


def _plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _check_whole(name: str, array: NDArray[Any], limits: np.iinfo[Any]) -> None:
    inside = (array >= int(limits.min)) & (array < int(limits.max) + 1)  # NaN is not
    if array.dtype.kind == "b" or not inside.all() or (array.dtype.kind == "f" and (array != np.rint(array)).any()):
        raise BadRow(f"{name} has entries that are no whole numbers of {limits.bits} bits")
