"""The engine's clock, which jumps, against a loop that takes every decode step."""

from __future__ import annotations

import numpy as np
import pytest
from planning.workload import RATES

from steadyrl.planning.engine_clock import Command, EngineClock, Group, decode_steps, versions_of
from steadyrl.planning.lengths import GroupLengths
from steadyrl.planning.rates import Rates

LOAD_S = 0.05


def random_work(seed):
    """Commands at random moments: groups of a stream, loads, requests."""
    rng = np.random.default_rng(seed)
    commands, sent, number = [], 0.0, 0
    for version in range(12):
        sent += float(rng.exponential(0.2))
        kind = ("admit", "load", "admit", "evaluate")[version % 4] if seed % 2 else ("admit", "load")[version % 2]
        groups = []
        if kind != "load":
            for _ in range(int(rng.integers(1, 5))):
                groups.append((number, int(rng.integers(1, 9)), rng.integers(1, 30, int(rng.integers(1, 4))).tolist()))
                number += 1
        commands.append((sent, kind, groups, version))
    return commands


def step_by_step(commands, rates, *, engines, places, until=1e9):
    """Ends of commands, arrivals, and the version of every token; a decode step at a time, nothing clever."""
    queue, waiting, running = list(commands), [], []
    now, version, arrivals, ends, tokens, left, started = 0.0, None, {}, {}, {}, {}, set()
    blocking, held = None, []
    while queue or waiting or running:
        if queue and blocking is None and (queue[0][0] <= now or not (waiting or running)):
            sent, kind, groups, number = queue.pop(0)
            now = max(now, sent)
            if kind == "load":
                now += LOAD_S
                version = number
                ends[number] = now
                continue
            for group, prompt, lengths in groups:
                left[group] = len(lengths)
                waiting += [[group, prompt, length, kind] for length in lengths]
            if kind == "admit":
                ends[number] = now
            else:
                blocking = (number, {group for group, _, _ in groups})
            continue
        prompts = 0
        while waiting and len(running) < places:
            row = waiting.pop(0)
            if row[0] not in started:
                started.add(row[0])
                prompts += row[1]
            running.append(row)
        now += prompts * rates.prefill_token_s / engines
        now += rates.decode_step_s + rates.decode_sequence_s * len(running) / engines
        for row in running:
            row[2] -= 1
            counts = tokens.setdefault(row[0], {})
            counts[version] = counts.get(version, 0) + 1
        for row in [row for row in running if row[2] == 0]:
            left[row[0]] -= 1
            if left[row[0]] == 0 and row[3] == "admit":
                held.append(row[0])
            elif left[row[0]] == 0:
                blocking[1].discard(row[0])
                if not blocking[1]:
                    ends[blocking[0]], blocking = now, None
        running = [row for row in running if row[2]]
        if blocking is None:
            arrivals |= dict.fromkeys(held, now)
            held = []
    return ends, arrivals, tokens


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("engines", "places"), [(1, 1000), (1, 3), (2, 4)])
def test_the_clock_agrees_with_every_single_step(seed, engines, places):
    rates = Rates(**{**RATES, "prefill_token_s": 0.003})
    work = random_work(seed)
    work.insert(0, (0.0, "load", [], -5))  # weights first, as in a run
    ends, arrivals, tokens = step_by_step(work, rates, engines=engines, places=places)

    clock = EngineClock(rates, engines=engines, places=places, load_s=LOAD_S, transfer_s=0.0)
    groups, commands = {}, {}
    for sent, kind, described, number in work:
        made = [Group(index, GroupLengths(prompt, np.array(lengths))) for index, prompt, lengths in described]
        groups |= {group.number: group for group in made}
        commands[number] = clock.send(Command(sent, kind, made, version=number))
        clock.advance(sent)  # a trainer that looks in every now and then changes nothing
    for command in commands.values():
        clock.finish(command)
    found = {}
    while len(found) < len(arrivals):
        found |= {arrival.number: arrival.at_s for arrival in clock.arrived(clock.next_arrival())}
    assert {number: command.end_s for number, command in commands.items()} == pytest.approx(ends)
    assert found == pytest.approx(arrivals)
    assert {number: versions_of(group, clock.loads) for number, group in groups.items()} == tokens


def test_what_is_sent_between_two_steps_waits_for_the_next_one():
    rates = Rates(**{**RATES, "decode_step_s": 1.0, "decode_sequence_s": 0.0})
    clock = EngineClock(rates, engines=1, places=10, load_s=0.25, transfer_s=0.0)
    clock.send(Command(0.0, "admit", [Group(0, GroupLengths(1, np.array([4])))]))
    load = clock.send(Command(1.5, "load", version=1))
    assert clock.finish(load) == 2.25
    assert clock.next_arrival() == 4.25


def test_the_trainer_has_a_group_after_its_transfer():
    rates = Rates(**{**RATES, "decode_step_s": 1.0, "decode_sequence_s": 0.0})
    clock = EngineClock(rates, engines=1, places=10, load_s=0.0, transfer_s=0.5)
    clock.send(Command(0.0, "admit", [Group(7, GroupLengths(1, np.array([2])))]))
    assert clock.arrived(2.4) == []
    assert clock.next_arrival() == 2.5
    assert [arrival.number for arrival in clock.arrived(2.5)] == [7]


def test_an_engine_without_work_is_not_busy():
    clock = EngineClock(Rates(**RATES), engines=1, places=10, load_s=0.1, transfer_s=0.0)
    clock.send(Command(5.0, "load", version=0))
    clock.advance(4.0)
    assert (clock.now_s, clock.busy_s) == (0.0, 0.0)
    clock.advance(9.0)
    assert (clock.now_s, clock.busy_s) == (pytest.approx(5.1), pytest.approx(0.1))


@pytest.mark.parametrize("places", [1, 2, 3, 100])
def test_decode_steps_against_a_loop(places):
    rng = np.random.default_rng(places)
    for _ in range(50):
        lengths = rng.integers(1, 12, 9).tolist()
        waiting, running, steps = list(lengths), [], 0
        while waiting or running:
            while waiting and len(running) < places:
                running.append(waiting.pop(0))
            running = [left - 1 for left in running if left > 1]
            steps += 1
        assert decode_steps(lengths, places) == steps
