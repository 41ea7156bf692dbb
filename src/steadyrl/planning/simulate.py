"""A run in simulated time: what the regimes do with the loop of trainer_clock.py, on rates instead of work.

Versions, admission and choice of groups are those of the pipeline itself (`schedule.py`, `admission.py`); what is
simulated is the clock. The engine is in a process of its own, as with every backend but `inline`. Left out: failures,
the straggler rule, the controller, and that two processes on one machine slow each other down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadyrl.config import RunConfig
from steadyrl.pipeline.admission import Outstanding, choose, room
from steadyrl.pipeline.schedule import generation_version
from steadyrl.planning.engine_clock import Command, Group
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.rates import Speed
from steadyrl.planning.trainer_clock import Prediction, TrainerClock


def simulate(config: RunConfig, shape: ModelShape, speed: Speed, *, steps: int, seed: int = 0) -> Prediction:
    """Predict a run from its first step, over `steps` optimizer steps or as many as the recipe has.

    Raises:
        ConfigError: the engine has no room for a single response.
    """
    per_batch = config.pipeline.steps_per_batch
    steps = min(config.trainer.steps, math.ceil(max(2, steps) / per_batch) * per_batch)
    run = _Streaming if config.pipeline.regime == "streaming" else _Scheduled
    return run(config, shape, speed, steps, seed).run()


class _Scheduled(TrainerClock):
    """Synchronous and batch-wise: batches are generated whole, from the versions of `schedule.py`."""

    def __init__(self, config: RunConfig, shape: ModelShape, speed: Speed, steps: int, seed: int) -> None:
        super().__init__(config, shape, speed, steps, seed)
        self._requests: dict[int, Command] = {}

    def prepare(self, batch: int) -> None:
        if batch in self._requests:
            return
        self.broadcast(generation_version(self.pipeline, batch))
        count = self.pipeline.prompts_per_batch
        groups = [self.draw(number) for number in range(batch * count, (batch + 1) * count)]
        self._requests[batch] = self.engine.send(Command(self.now_s, "generate", groups))

    def prepare_ahead(self, batch: int) -> None:
        if self.pipeline.regime == "batch" and batch < self.config.num_batches:
            self.prepare(batch)

    def collect(self, batch: int) -> list[Group]:
        request = self._requests.pop(batch)
        self.wait_until(self.engine.finish(request) + self._transfer_s * len(request.groups))
        return list(request.groups)


@dataclass
class _Outstanding:
    """A group that was let in and not trained on yet."""

    group: Group
    due: int
    is_finished: bool = False


class _Streaming(TrainerClock):
    """Fully asynchronous: groups are let in as `admission.py` has room, and taken when they are finished."""

    def __init__(self, config: RunConfig, shape: ModelShape, speed: Speed, steps: int, seed: int) -> None:
        super().__init__(config, shape, speed, steps, seed)
        self._outstanding: dict[int, _Outstanding] = {}  # by number, in the order in which they were let in
        self._next = 0

    def prepare(self, batch: int) -> None:
        if self.engine_version < 0 or batch - self.engine_version >= self.pipeline.lag:
            self.broadcast(batch)
        self._admit(batch)

    def prepare_ahead(self, batch: int) -> None:
        self._admit(batch)

    def collect(self, batch: int) -> list[Group]:
        self._receive()
        while (chosen := self._choose(batch)) is None:
            self._admit(batch)
            self.wait_until(self.engine.next_arrival())
            self._receive()
        return [self._outstanding.pop(number).group for number in chosen]

    def _admit(self, version: int) -> None:
        pipeline = self.pipeline
        due = self.engine_version + pipeline.max_lag
        if due < version:
            return
        outstanding = self._states()
        free = room(outstanding, due=due, version=version, groups_per_step=pipeline.prompts_per_batch)
        limit = pipeline.most_groups_in_flight
        free = min(free, limit - sum(not group.is_finished for group in outstanding))
        free = min(free, limit + pipeline.most_ready_groups - len(outstanding))
        free = min(free, (self.config.trainer.steps - version) * pipeline.prompts_per_batch - len(outstanding))
        if free <= 0:
            return
        groups = [self.draw(self._next + index) for index in range(free)]
        self._next += free
        self._outstanding |= {group.number: _Outstanding(group, due) for group in groups}
        self.engine.send(Command(self.now_s, "admit", groups))

    def _receive(self) -> None:
        for arrival in self.engine.arrived(self.now_s):
            self._outstanding[arrival.number].is_finished = True

    def _choose(self, version: int) -> list[int] | None:
        states, wanted = self._states(), self.pipeline.prompts_per_batch
        if sum(group.is_finished for group in states) < wanted:
            return None
        chosen = choose(states, version=version, groups_per_step=wanted)
        numbers = list(self._outstanding)
        return None if chosen is None else [numbers[index] for index in chosen]

    def _states(self) -> list[Outstanding]:
        return [Outstanding(one.due, one.is_finished) for one in self._outstanding.values()]
