"""Who may start and who is trained on next in the streaming regime, so that no token's lag exceeds a bound.

Nothing is thrown away to keep the bound: it is kept by what is let in, and by waiting for what is due. A group of
responses that is let in while the engine holds version e has no token older than e, so it is within a bound of L
steps as long as it is trained on at version e + L or before: its *due* version. Let s be the learner's version, B the
groups of one optimizer step, and N(d) the number of groups that were let in, were not trained on yet, and are due at
version d or before. The invariant

    N(d) <= B (d - s + 1)   for every d >= s,   and N(s - 1) = 0                                        (*)

says that the steps s, s+1, ..., d have room for everything that is due by d.

* `room` lets a group in only if (*) still holds with it. The new group is due last, so only d = e + L matters.
* `choose` takes the B finished groups that are due first, if (*) holds for s + 1 without them; otherwise the trainer
  has to wait for a group that is still being generated.

If all groups are finished and there are at least B of them, `choose` succeeds: of each N(d) it takes all or B. And
`room` lets B groups in whenever e + L >= s. So the trainer never waits for ever, and with L = 0 it waits for the B
groups of its own version, as in the synchronous regime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outstanding:
    """A group that was let in and not trained on yet."""

    due: int  # the last version at which it may be trained on
    is_finished: bool


def room(outstanding: Sequence[Outstanding], *, due: int, version: int, groups_per_step: int) -> int:
    """How many more groups may be let in that are due at `due`; `version` is the learner's.

    `due` must not be before that of any group in `outstanding`.
    """
    assert all(group.due <= due for group in outstanding)
    return max(0, groups_per_step * (due - version + 1) - len(outstanding))


def choose(outstanding: Sequence[Outstanding], *, version: int, groups_per_step: int) -> list[int] | None:
    """Which groups to train on at `version`: indices, the first due first. None: wait for one that is not finished."""
    finished = [index for index, group in enumerate(outstanding) if group.is_finished]
    chosen = sorted(finished, key=lambda index: outstanding[index].due)[:groups_per_step]
    if len(chosen) < groups_per_step:
        return None
    taken = set(chosen)
    rest = [group.due for index, group in enumerate(outstanding) if index not in taken]
    return chosen if has_room(rest, version + 1, groups_per_step) else None


def has_room(dues: Sequence[int], version: int, groups_per_step: int) -> bool:
    """The invariant (*): every step up to any version can take what is due by then."""
    return all(
        number <= groups_per_step * max(0, due - version + 1) for number, due in enumerate(sorted(dues), start=1)
    )
