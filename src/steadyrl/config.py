"""A run, described: pydantic models, their checks, and the arithmetic that a user should see first.

A recipe is a TOML file with these tables, see `recipe.py`. Sizes carry their unit in the name: prompts,
responses, tokens, optimizer steps. Nothing here needs torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steadyrl.axes import AboveZero, Table, ZeroOrMore
from steadyrl.method import ObjectiveConfig

MOST = 1_000_000_000  # of anything that is counted
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]


class ModelConfig(Table):
    """The policy: a Hugging Face causal language model."""

    # a folder, a hub name, "bundled:NAME" (shipped with steadyrl), or "package:PACKAGE/FILE.gguf"
    path: str = "bundled:tiny_moe"
    routing_replay: bool = False  # R3: train through the experts that the engine chose


class ArithmeticTask(Table):
    """Running sums with visible steps, generated from the seed."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: Annotated[int, Field(ge=2, le=20)] = 5
    max_term: Annotated[int, Field(ge=1, le=999)] = 9


class ReasoningTask(Table):
    """A procedural task of the reasoning-gym package, with its own scorer (extra `real`)."""

    name: Literal["reasoning_gym"]
    dataset: str = "chain_sum"
    options: dict[str, Any] = Field(default_factory=dict)
    instruction: str = ""  # put in front of every question


Task = Annotated[ArithmeticTask | ReasoningTask, Field(discriminator="name")]


class SamplingConfig(Table):
    max_response_tokens: Positive = 32
    temperature: Temperature = 1.0


class EngineConfig(Table):
    """The embedded rollout engine."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_sequences: Positive = 1024  # decoded together; more are taken in turns
    threads: Threads = 1  # of the engine's process; threads of two processes that share a core wait for each other
    start_timeout_s: AboveZero = 300
    generate_timeout_s: AboveZero = 600


class TrainerConfig(Table):
    steps: Positive = 100  # optimizer steps
    lr: AboveZero = 3e-4
    lr_warmup_steps: NonNegative = 0  # optimizer steps; the rate is constant afterwards
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    eps: AboveZero = 1e-8
    weight_decay: ZeroOrMore = 0.0
    max_grad_norm: AboveZero = 1.0
    tokens_per_micro_batch: Positive = 32768  # padded tokens in one forward pass
    threads: Threads = 1


class PipelineConfig(Table):
    regime: Literal["sync", "batch"] = "batch"
    lag: Annotated[int, Field(ge=0, le=10_000)] = (
        1  # optimizer steps between two broadcasts of the weights; 0 with regime = "sync"
    )
    prompts_per_batch: Positive = 32
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    steps_per_batch: Positive = 1  # optimizer steps taken on each batch
    backend: Literal["inline", "process"] = "process"

    @property
    def responses_per_batch(self) -> int:
        return self.prompts_per_batch * self.responses_per_prompt

    @property
    def largest_lag(self) -> int:
        """The lag that no token exceeds and some token reaches, in optimizer steps (docs/staleness.md).

        With M steps per batch and a broadcast every n steps, batch k is generated from version
        n * floor((k - 1) * M / n) and trained on up to version (k + 1) * M - 1.
        """
        steps, every = self.steps_per_batch, self.lag
        if self.regime == "sync":
            return steps - 1
        return 2 * steps - 1 + every - math.gcd(every, steps)


class EvaluationConfig(Table):
    """Evaluation has sampling settings of its own; it always covers the whole held-out set."""

    every_steps: NonNegative = 20  # optimizer steps; 0 = only before the first and after the last
    prompts: Positive = 128  # size of the held-out set
    samples_per_prompt: Positive = 8  # k
    temperature: Temperature = 1.0
    max_response_tokens: Positive = 32


class CheckpointConfig(Table):
    every_steps: NonNegative = 0  # optimizer steps; 0 = only at the end or when stopped
    keep: Positive = 2


class RecordConfig(Table):
    rollouts_every_batches: NonNegative = 10  # 0 = keep no rollouts


class RunConfig(Table):
    """A whole run. The start of `steadyrl train` prints `arithmetic()` of it."""

    seed: NonNegative = 0
    run_dir: Annotated[str, Field(min_length=1)] = "runs/run"
    objective: ObjectiveConfig = ObjectiveConfig()
    model: ModelConfig = ModelConfig()
    task: Task = ArithmeticTask()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()

    @model_validator(mode="before")
    @classmethod
    def _default_task(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("task"), dict):
            value = {**value, "task": {"name": "arithmetic", **value["task"]}}
        return value

    @model_validator(mode="after")
    def _sizes_and_combinations(self) -> RunConfig:
        pipeline, steps = self.pipeline, self.trainer.steps
        per_batch = pipeline.steps_per_batch
        if pipeline.regime == "sync" and pipeline.lag != 0:
            raise ValueError(
                f'pipeline.regime = "sync" trains on fresh rollouts only: set pipeline.lag=0 (it is {pipeline.lag})'
            )
        if pipeline.regime == "batch" and pipeline.lag == 0:
            raise ValueError(
                "pipeline.lag = 0 means fresh rollouts: set pipeline.regime=sync, or pipeline.lag to 1 or more"
            )
        if steps % per_batch:
            raise ValueError(
                f"trainer.steps = {steps} is not a multiple of pipeline.steps_per_batch = {per_batch}: "
                f"set trainer.steps to {steps + per_batch - steps % per_batch}"
            )
        if pipeline.prompts_per_batch % per_batch:
            raise ValueError(
                f"pipeline.prompts_per_batch = {pipeline.prompts_per_batch} cannot be shared out over "
                f"pipeline.steps_per_batch = {per_batch} optimizer steps: make it a multiple of {per_batch}"
            )
        anchor, ratio_one = self.objective.anchor, None
        if anchor == "old_actor" and pipeline.largest_lag == 0:
            ratio_one = "the weights that sampled are the weights being trained"
        if anchor == "step_start" and per_batch == 1:
            ratio_one = "with one optimizer step per batch, the weights before the batch are the weights being trained"
        if ratio_one:
            raise ValueError(
                f'objective.anchor = "{anchor}" makes every ratio exactly 1 here, so no clip or gate can act: '
                f"{ratio_one}. Use objective.anchor=rollout, or more lag (pipeline.regime=batch, pipeline.lag=1 or "
                "more for old_actor; pipeline.steps_per_batch=2 or more for step_start)"
            )
        return self

    @property
    def num_batches(self) -> int:
        return self.trainer.steps // self.pipeline.steps_per_batch

    def arithmetic(self) -> list[str]:
        """What the sizes amount to, a sentence each."""
        pipeline = self.pipeline
        broadcast = (
            "weights broadcast before every batch"
            if pipeline.regime == "sync"
            else f"weights broadcast every {pipeline.lag} optimizer steps"
        )
        return [
            f"{pipeline.prompts_per_batch} prompts x {pipeline.responses_per_prompt} responses = "
            f"{pipeline.responses_per_batch} responses per batch",
            f"{self.num_batches} batches x {pipeline.steps_per_batch} optimizer steps = "
            f"{self.trainer.steps} optimizer steps, each on "
            f"{pipeline.responses_per_batch // pipeline.steps_per_batch} responses",
            f"{broadcast}; largest possible lag: {pipeline.largest_lag} optimizer steps",
            f"objective {self.objective.describe()}",
        ]
