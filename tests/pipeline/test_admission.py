"""Admission by simulation: any order of finishing, and the bound holds, is reached, and nothing waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.pipeline.admission import Outstanding, choose, has_room, room


class Simulation:
    """Groups that finish in any order, a learner of `steps` optimizer steps, a broadcast every few steps."""

    def __init__(self, max_lag: int, groups_per_step: int, broadcast_every: int, chance: random.Random) -> None:
        self.max_lag, self.size, self.every, self.chance = max_lag, groups_per_step, broadcast_every, chance
        self.version = self.engine = 0
        self.groups: list[tuple[int, int]] = []  # number, engine version at admission
        self.finished: set[int] = set()
        self.numbers = itertools.count()
        self.lags: list[int] = []
        self.waits = 0

    def outstanding(self) -> list[Outstanding]:
        return [Outstanding(version + self.max_lag, number in self.finished) for number, version in self.groups]

    def admit(self) -> None:
        free = room(
            self.outstanding(),
            due=max(self.engine + self.max_lag, self.version),
            version=self.version,
            groups_per_step=self.size,
        )
        if self.engine + self.max_lag >= self.version:
            self.groups += [(next(self.numbers), self.engine) for _ in range(free)]

    def step(self) -> None:
        self.admit()
        while (chosen := choose(self.outstanding(), version=self.version, groups_per_step=self.size)) is None:
            running = [number for number, _ in self.groups if number not in self.finished]
            assert running, "the trainer waits and nothing is being generated"
            self.finished.add(self.chance.choice(running))
            self.waits += 1
        self.lags += [self.version - self.groups[index][1] for index in chosen]
        self.groups = [group for index, group in enumerate(self.groups) if index not in set(chosen)]
        self.version += 1
        if self.version % self.every == 0:
            self.engine = self.version


@given(st.integers(0, 9), st.integers(1, 5), st.data())
def test_the_bound_holds_for_any_order_of_finishing(max_lag, groups_per_step, data):
    every = data.draw(st.integers(1, max_lag + 1))
    simulation = Simulation(max_lag, groups_per_step, every, random.Random(data.draw(st.integers(0, 2**32))))
    for _ in range(40):
        simulation.step()
        assert has_room([group.due for group in simulation.outstanding()], simulation.version, groups_per_step)
    assert max(simulation.lags) <= max_lag
    assert len(simulation.lags) == 40 * groups_per_step  # nothing dropped


@pytest.mark.parametrize("max_lag", [0, 1, 3, 8])
def test_the_bound_is_reached(max_lag):
    simulation = Simulation(max_lag, 3, 1, random.Random(0))
    for _ in range(40):
        simulation.step()
    assert max(simulation.lags) == max_lag


def test_a_group_that_never_finishes_holds_the_trainer_at_its_due_version_and_not_before():
    groups = [Outstanding(2, False), *[Outstanding(2, True)] * 5]
    assert choose(groups, version=0, groups_per_step=2) == [1, 2]
    assert choose(groups[:1] + groups[3:], version=1, groups_per_step=2) == [1, 2]
    assert choose(groups[:1] + groups[5:], version=2, groups_per_step=2) is None
    late = [*groups[:1], *[Outstanding(9, True)] * 5]  # there are others, but they must not overtake it
    assert choose(late, version=1, groups_per_step=2) == [1, 2]
    assert choose(late, version=2, groups_per_step=2) is None


def test_the_first_due_are_taken_first():
    dues = [7, 3, 5, 3, 9]
    assert choose([Outstanding(due, True) for due in dues], version=3, groups_per_step=3) == [1, 3, 2]


def brute_force_has_room(dues: list[int], version: int, size: int) -> bool:
    """Whether some order of training serves everyone in time."""
    for order in itertools.permutations(dues):
        if all(version + place // size <= due for place, due in enumerate(order)):
            return True
    return False


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 2), st.integers(1, 3))
def test_the_invariant_is_that_everyone_can_be_served_in_time(dues, version, size):
    assert has_room(dues, version, size) == brute_force_has_room(dues, version, size)


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 2))
def test_room_is_the_largest_number_that_keeps_the_invariant(dues, size):
    if not has_room(dues, 0, size):
        return
    free = room([Outstanding(due, False) for due in dues], due=3, version=0, groups_per_step=size)
    assert has_room([*dues, *[3] * free], 0, size)
    assert not has_room([*dues, *[3] * (free + 1)], 0, size)
