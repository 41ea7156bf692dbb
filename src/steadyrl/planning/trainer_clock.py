"""The trainer of a simulation: the loop of pipeline/loop.py, with its waits in their order, in simulated seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.pipeline.weights import NUM_SLOTS
from steadyrl.planning.engine_clock import Command, EngineClock, Group, versions_of
from steadyrl.planning.lengths import mean_lengths
from steadyrl.planning.memory import ITEMSIZE, largest_checkpoint_bytes
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.placement import placement_of
from steadyrl.planning.rates import Speed, cache_room


@dataclass(frozen=True)
class Prediction:
    """What a simulation says. Shares are of the whole simulated time."""

    regime: str
    lag: int  # pipeline.lag
    steps: int  # optimizer steps that were simulated
    step_s: float  # from the end of the first step to the end of the last, over the steps between
    tokens_per_s: float  # sampled tokens trained on, in that time
    trainer_working: float  # share: train, broadcast, grade
    engine_working: float  # share: generate, evaluate, load
    trainer_waits_s: float  # in a step, on average
    engine_waits_s: float
    lag_mean: float  # of a token, in optimizer steps
    lag_max: int
    lag_shares: list[float]  # of tokens at lag 0, 1, ..., the bound
    places: int  # responses that may run at a time
    run_s: float  # all steps of the recipe at this pace


class TrainerClock(ABC):
    """The trainer's side that all regimes share: `now_s` is its clock."""

    def __init__(self, config: RunConfig, shape: ModelShape, speed: Speed, steps: int, seed: int) -> None:
        self.config = config
        self.pipeline = config.pipeline
        self.rates = speed.rates
        self.now_s = 0.0
        self.steps = steps
        self.version = 0
        self._lengths = speed.lengths
        self._rng = np.random.default_rng(seed)
        self._transfer_s = self.rates.transfer_response_s * self.pipeline.responses_per_prompt  # of a group
        weights = shape.parameters * ITEMSIZE[config.engine.dtype]
        self._broadcast_s = weights / self.rates.broadcast_bytes_per_s
        self._places = places(config, shape, speed)
        self.engine = EngineClock(
            self.rates,
            engines=config.engine.count,
            places=self._places,
            load_s=weights / self.rates.load_bytes_per_s,
            transfer_s=self._transfer_s,
        )
        self.engine_version = -1  # once it has done what it was asked
        self._loading: deque[Command] = deque()
        self._evaluation: Command | None = None
        self._evaluation_prompts = config.evaluation.prompts or speed.evaluation_prompts
        self._checkpoint_s = largest_checkpoint_bytes(shape, config) / self.rates.checkpoint_bytes_per_s
        self._working_s = self._waiting_s = 0.0
        self._ends_s: list[float] = []
        self._tokens: list[int] = []  # sampled, of each step
        self._lags = np.zeros(self.pipeline.largest_lag + 1)

    # ---- what a regime does ----

    @abstractmethod
    def prepare(self, batch: int) -> None: ...

    @abstractmethod
    def prepare_ahead(self, batch: int) -> None: ...

    @abstractmethod
    def collect(self, batch: int) -> list[Group]: ...

    # ---- the loop ----

    def run(self) -> Prediction:
        per_batch = self.pipeline.steps_per_batch
        for batch in range(self.steps // per_batch):
            self.prepare(batch)
            self._collect_evaluation()
            groups = self.collect(batch)
            self.work(self.rates.grade_response_s * len(groups) * self.pipeline.responses_per_prompt)
            if self._evaluation_due():
                self._submit_evaluation()
            self.prepare_ahead(batch + 1)
            share = len(groups) // per_batch
            for start in range(0, len(groups), share):
                self._train(groups[start : start + share])
            every = self.config.record.rollouts_every_batches
            if every and batch % every == 0:
                self.now_s += self.rates.record_batch_s
        return self._prediction()

    def _train(self, groups: list[Group]) -> None:
        sampled = sum(int(group.lengths.responses.sum()) for group in groups)
        prompts = sum(group.lengths.prompt * len(group.lengths.responses) for group in groups)
        for group in groups:
            for version, tokens in versions_of(group, self.engine.loads).items():
                self._lags[self.version - version] += tokens
        self.work(self.rates.train_step_s + (sampled + prompts) / self.rates.train_tokens_per_s)
        self.now_s += self.rates.step_other_s
        self.version += 1
        self._ends_s.append(self.now_s)
        self._tokens.append(sampled)
        every = self.config.checkpoint.every_steps
        if every and self.version % every == 0 and self.version < self.config.trainer.steps:
            self._collect_evaluation()
            self.now_s += self._checkpoint_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self._working_s += seconds

    def wait_until(self, moment_s: float) -> None:
        waited = max(0.0, moment_s - self.now_s)
        self.now_s += waited
        self._waiting_s += waited

    def draw(self, number: int) -> Group:
        lengths = self._lengths.draw(
            self._rng, self.pipeline.responses_per_prompt, self.config.sampling.max_response_tokens
        )
        return Group(number, lengths)

    def broadcast(self, version: int) -> None:
        """Make the engine hold a version; waits while as many as there are slots have not been taken over."""
        if version == self.engine_version:
            return
        started_s = self.now_s
        self.engine.advance(self.now_s)
        while self._loading and self._loading[0].end_s <= self.now_s:
            self._loading.popleft()
        if len(self._loading) == NUM_SLOTS:
            self.now_s = max(self.now_s, self.engine.finish(self._loading.popleft()))
        self.now_s += self._broadcast_s
        self._working_s += self.now_s - started_s  # run folders book the wait for a slot as broadcast, too
        self._loading.append(self.engine.send(Command(self.now_s, "load", version=version)))
        self.engine_version = version

    def _evaluation_due(self) -> bool:
        every = self.config.evaluation.every_steps
        if self.version == 0:
            return True
        before = self.version - self.pipeline.steps_per_batch
        return every > 0 and self.version // every > before // every

    def _submit_evaluation(self) -> None:
        self.broadcast(self.version)
        evaluation = self.config.evaluation
        groups = [
            Group(-1, self._lengths.draw(self._rng, evaluation.samples_per_prompt, evaluation.max_response_tokens))
            for _ in range(self._evaluation_prompts)
        ]
        self._evaluation = self.engine.send(Command(self.now_s, "evaluate", groups))

    def _collect_evaluation(self) -> None:
        if self._evaluation is None:
            return
        responses = self._evaluation_prompts * self.config.evaluation.samples_per_prompt
        self.wait_until(self.engine.finish(self._evaluation) + self.rates.transfer_response_s * responses)
        self._evaluation = None
        self.now_s += self.rates.grade_response_s * responses

    def _prediction(self) -> Prediction:
        warm_up = min(1, len(self._ends_s) - 1)  # the first step, where there are others
        first, last = self._ends_s[0] if warm_up else 0.0, self._ends_s[-1]
        step_s = (last - first) / (len(self._ends_s) - warm_up)
        self.engine.advance(last)
        lags = self._lags / self._lags.sum()
        return Prediction(
            regime=self.pipeline.regime,
            lag=self.pipeline.lag,
            steps=self.steps,
            step_s=step_s,
            tokens_per_s=sum(self._tokens[warm_up:]) / (last - first),
            trainer_working=self._working_s / self.now_s,
            engine_working=min(1.0, self.engine.busy_s / self.now_s),
            trainer_waits_s=self._waiting_s / self.steps,
            engine_waits_s=max(0.0, self.now_s - self.engine.busy_s) / self.steps,
            lag_mean=float(lags @ np.arange(len(lags))),
            lag_max=int(np.flatnonzero(lags)[-1]),
            lag_shares=lags.tolist(),
            places=self._places,
            run_s=first + step_s * (self.config.trainer.steps - warm_up),
        )


def places(config: RunConfig, shape: ModelShape, speed: Speed) -> int:
    """Responses that may run at a time: as the recipe says, and as far as their keys and values have room."""
    placement = placement_of(config, 1 if speed.hardware is None else speed.hardware.gpus_per_engine)
    most = placement.engines * config.engine.max_sequences
    tokens = cache_room(shape, config, placement, speed)
    if tokens is None:
        return most
    means = mean_lengths(speed.lengths, config.pipeline.responses_per_prompt, config.sampling.max_response_tokens)
    fitting = int(tokens / means.context)
    if fitting == 0:
        raise ConfigError(
            "the weights leave no room for keys and values in an engine: raise gpus_per_engine or gpu_memory_gib in "
            "the [hardware] of --rates"
        )
    return min(most, fitting)
