"""The fully asynchronous regime, on the trainer's side: rollouts stream, and `admission.py` bounds their lag.

    prepare        broadcast the newest weights if it is their turn, into the running generation;
                   let groups in as far as the bound has room
    collect        take what has arrived, until a batch may be trained on
    prepare_ahead  that batch has left: let the next groups in, to be generated while it is trained on

A group is a prompt of the data with its number in the order of the data. It is trained on once, or given up by the
engine's straggler rule and counted, or, when the run ends or is resumed in the middle of it, begun again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError
from steadyrl.pipeline.admission import Outstanding, choose, room
from steadyrl.pipeline.controller import Controller, Settings
from steadyrl.pipeline.engine_link import EngineLink
from steadyrl.pipeline.group_stream import Arrival
from steadyrl.pipeline.source import PromptGroup, group_request
from steadyrl.tasks.base import Task
from steadyrl.types import Prompt, Rollout

BUFFER = "buffer.jsonl"
MOST_GIVEN_UP = 100  # groups in a row, and at least as often as there are groups in flight


@dataclass
class _Group:
    """A group that was let in and not trained on yet."""

    prompt: Prompt
    due: int  # the last version at which it may be trained on
    rollouts: list[Rollout] | None = None  # once they have arrived


class StreamingSource:
    """A `BatchSource` whose batches are the groups that are finished and due first."""

    def __init__(self, config: RunConfig, task: Task, engine: EngineLink) -> None:
        self._config = config
        self._pipeline = config.pipeline
        self._task = task
        self._engine = engine
        self._settings = Settings(config.pipeline.lag, config.pipeline.most_groups_in_flight)
        control = config.pipeline.controller
        self._controller = None if control is None else Controller(control, config.pipeline)
        self._groups: dict[int, _Group] = {}  # by number, in the order in which they were let in
        self._taken: list[int] = []  # the batch collected last, until it was trained on
        self._next = 0  # the first number that was never let in
        self._returned: list[int] = []  # numbers that go back to the data: a resumed run begins them again
        self._given_up = 0  # groups since the last metrics
        self._given_up_in_a_row = 0
        self._tally = (0, 0)  # rollouts generated, and given up, since the last call
        self._arrived_tokens: list[int] = []  # of each response since the last metrics
        self._depth = 0  # groups that were ready when the trainer asked
        self._in_flight = 0  # and those in the engine

    # ---- the loop's side ----

    def prepare(self, batch_id: int) -> None:
        if self._engine.version < 0 or batch_id - self._engine.version >= self._settings.broadcast_every:
            self._engine.broadcast(batch_id)
        self._admit(batch_id)

    def prepare_ahead(self, batch_id: int) -> None:
        self._admit(batch_id)

    def collect(self, batch_id: int) -> list[PromptGroup]:
        self._receive(wait=False)
        self._depth = sum(group.rollouts is not None for group in self._groups.values())
        self._in_flight = len(self._groups) - self._depth
        start = time.monotonic()
        while (numbers := self._choose(batch_id)) is None:
            self._admit(batch_id)  # in place of groups that were given up
            self._receive(wait=True)
        self._engine.note_wait(start)
        self._taken = sorted(numbers)
        batch = []
        for index, number in enumerate(self._taken):
            group = self._groups[number]
            assert group.rollouts is not None
            for rollout in group.rollouts:
                rollout.group = index
            batch.append(PromptGroup(group.prompt, group.rollouts))
        return batch

    def release(self) -> None:
        for number in self._taken:
            del self._groups[number]
        self._taken = []

    @property
    def buffered(self) -> int:
        return sum(len(group.rollouts or ()) for number, group in self._groups.items() if number not in self._taken)

    def tally(self) -> tuple[int, int]:
        tally, self._tally = self._tally, (0, 0)
        return tally

    def metrics(self) -> dict[str, float]:
        values = {
            "stream/ready_groups": float(self._depth),
            "stream/groups_in_flight": float(self._in_flight),
            "stream/groups_given_up": float(self._given_up),
            "stream/groups_in_flight_limit": float(self._settings.groups_in_flight),
            "stream/broadcast_every": float(self._settings.broadcast_every),
        }
        if self._arrived_tokens:
            values["response/tokens_generated"] = sum(self._arrived_tokens) / len(self._arrived_tokens)
        self._given_up, self._arrived_tokens = 0, []
        return values

    def observe(self, metrics: dict[str, float]) -> str | None:
        decision = self._controller.observe(metrics, self._settings) if self._controller else None
        if decision is None:
            return None
        self._settings = decision.settings
        return (
            f"{decision.reason}: {self._settings.groups_in_flight} groups in flight, weights broadcast every "
            f"{self._settings.broadcast_every} steps"
        )

    def describe(self) -> str:
        groups = list(self._groups.values())
        running = [group for group in groups if group.rollouts is None]
        first = f", first {running[0].prompt.prompt_id}, due at version {running[0].due}" if running else ""
        return f"{len(running)} groups are in the engine{first}; {len(groups) - len(running)} are ready"

    def save(self, folder: Path) -> dict[str, Any]:
        waiting = {number: group for number, group in self._groups.items() if group.rollouts is not None}
        with (folder / BUFFER).open("w", encoding="utf-8") as file:
            for number, group in waiting.items():
                assert group.rollouts is not None
                rollouts = [rollout.to_json(with_likeliest=True) for rollout in group.rollouts]
                file.write(json.dumps({"number": number, "due": group.due, "rollouts": rollouts}) + "\n")
        begun = [number for number, group in self._groups.items() if group.rollouts is None]
        held = sum(len(group.rollouts or ()) for group in waiting.values())
        return {
            "held": held,
            "next": self._next,
            "begun": sorted([*self._returned, *begun]),
            "settings": dataclasses.asdict(self._settings),
        }

    def resume(self, folder: Path, state: dict[str, Any]) -> None:
        self._next, self._returned = state["next"], list(state["begun"])
        self._settings = Settings(**state["settings"])
        for line in (folder / BUFFER).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rollouts = [Rollout.from_json(rollout) for rollout in row["rollouts"]]
            self._groups[row["number"]] = _Group(self._prompt(row["number"]), row["due"], rollouts)

    # ---- groups ----

    def _admit(self, version: int) -> None:
        """Let in what the bound has room for, and the limit on groups in flight.

        `version` is that of the next batch that is not chosen yet.
        """
        due = self._engine.version + self._pipeline.max_lag
        outstanding = self._outstanding()
        if due < version:
            return  # until the next broadcast
        free = room(outstanding, due=due, version=version, groups_per_step=self._pipeline.prompts_per_batch)
        limit = self._settings.groups_in_flight
        free = min(free, limit - sum(not group.is_finished for group in outstanding))
        # an engine that is faster than the trainer must not fill the queue with what will be old
        free = min(free, limit + self._pipeline.most_ready_groups - len(outstanding))
        left = self._config.trainer.steps - version  # no more than the run will train on
        free = min(free, left * self._pipeline.prompts_per_batch - len(outstanding))
        admitted = []
        for _ in range(max(0, free)):
            number = self._returned.pop(0) if self._returned else self._next
            self._next = max(self._next, number + 1)
            prompt = self._prompt(number)
            self._groups[number] = _Group(prompt, due)
            admitted.append((number, group_request(self._config, [prompt], number)))
        if admitted:
            self._engine.backend.admit(admitted)

    def _prompt(self, number: int) -> Prompt:
        return self._task.prompts("train", number, 1)[0]

    def _waiting(self) -> dict[int, _Group]:
        return {number: group for number, group in self._groups.items() if number not in self._taken}

    def _outstanding(self) -> list[Outstanding]:
        return [Outstanding(group.due, group.rollouts is not None) for group in self._waiting().values()]

    def _choose(self, version: int) -> list[int] | None:
        chosen = choose(self._outstanding(), version=version, groups_per_step=self._pipeline.prompts_per_batch)
        numbers = list(self._waiting())
        return None if chosen is None else [numbers[index] for index in chosen]

    def _receive(self, *, wait: bool) -> None:
        for arrival in self._engine.backend.arrivals(wait=wait):
            self._engine.clock.engine("generate", arrival.start_s, arrival.end_s, self._engine.version)
            generated, given_up = self._tally
            size = self._pipeline.responses_per_prompt
            self._tally = generated + size, given_up + (0 if arrival.rollouts else size)
            if not arrival.rollouts:
                del self._groups[arrival.number]
                self._count_given_up()
                continue
            self._given_up_in_a_row = 0
            self._check(arrival)
            self._groups[arrival.number].rollouts = arrival.rollouts
            self._arrived_tokens += [rollout.num_sampled for rollout in arrival.rollouts]

    def _count_given_up(self) -> None:
        """Raises EngineError where groups are given up and nothing else happens any more."""
        self._given_up += 1
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= max(MOST_GIVEN_UP, self._settings.groups_in_flight):
            raise EngineError(
                f"{self._given_up_in_a_row} groups in a row were given up, because a response took longer than "
                f"pipeline.rollout_timeout_s = {self._pipeline.rollout_timeout_s:g}: raise it, or set "
                "pipeline.on_timeout=keep to train on what there is"
            )

    def _check(self, arrival: Arrival) -> None:
        group = self._groups.get(arrival.number)
        wanted = self._pipeline.responses_per_prompt
        if group is None or group.rollouts is not None:
            raise EngineError(f"the engine answered group {arrival.number}, which nobody waits for")
        answered = {rollout.prompt_id for rollout in arrival.rollouts}
        if len(arrival.rollouts) != wanted or answered != {group.prompt.prompt_id}:
            raise EngineError(
                f"the engine answered group {arrival.number} with {len(arrival.rollouts)} rollouts of "
                f"{', '.join(sorted(answered))} instead of {wanted} of {group.prompt.prompt_id}: it mixed them up"
            )
