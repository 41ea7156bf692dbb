"""One recorded response, whatever wrote it down, and how a row of a file becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]
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
    """A list of the row as an array; None if it is missing or null. A null inside a list of numbers is NaN.

    Raises:
        BadRow: it is no list of numbers, or not one of n.
    """
    value = row.get(name)
    if value is None:
        return None
    try:
        if hasattr(value, "detach"):  # a torch tensor, possibly bfloat16, which numpy does not know
            value = value.detach().float().numpy() if value.is_floating_point() else value.detach().numpy()
        array = np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError):
        raise BadRow(f"{name} is not a list of numbers") from None
    if array.ndim != 1:
        raise BadRow(f"{name} is not a list of numbers")
    if n is not None and len(array) != n:
        raise BadRow(f"{name} has {len(array)} entries for {n} tokens")
    return array


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
    """One number for the whole response, or one for each token."""
    value: Any = row.get(name)
    if getattr(value, "ndim", 1) == 0:
        value = float(value)
    if isinstance(value, int | float):
        return np.full(n, value, np.float32)
    return column(row, name, np.float32, n)


def number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float | np.number) and np.isfinite(float(value)) else None


def whole(row: Row, name: str) -> int | None:
    value = row.get(name)
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
