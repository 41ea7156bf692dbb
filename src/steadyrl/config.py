"""A run, described: pydantic models, their checks, and the arithmetic that a user should see first.

A recipe is a TOML file with these tables, see `recipe.py`. Sizes carry their unit in the name: prompts,
responses, tokens, optimizer steps. Nothing here needs torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from steadyrl.axes import AboveZero, Table, ZeroOrMore
from steadyrl.method import ObjectiveConfig
from steadyrl.task_config import ArithmeticTask, Task, Threads

MOST = 1_000_000_000  # of anything that is counted
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Lag = Annotated[int, Field(ge=0, le=10_000)]  # a histogram has a place for each
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]


class ModelConfig(Table):
    """The policy: a Hugging Face causal language model."""

    # a folder, a hub name, "bundled:NAME" (shipped with steadyrl), or "package:PACKAGE/FILE.gguf"
    path: str = "bundled:tiny_moe"
    routing_replay: bool = False  # R3: train through the experts that the engine chose
    # of the trainer's matrix products; its weights, gradients and moments are float32 either way
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "eager"] = "auto"  # of the trainer; auto = sdpa where the model has it
    gradient_checkpointing: bool = False  # keep a layer's input only, and run the layer again in the backward pass


class SamplingConfig(Table):
    max_response_tokens: Positive = 32
    temperature: Temperature = 1.0
    # draw from the top_k likeliest tokens, of these from the likeliest with at least the share top_p of the mass
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 = from all
    top_k: NonNegative = 0  # 0 = from all
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # strings that end a response, which keeps them
    # a prompt that leaves no room for max_response_tokens ends the run, or is answered with nothing and counted
    long_prompts: Literal["refuse", "drop"] = "refuse"

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be drawn, so that the trainer has to know which."""
        return self.top_p < 1 or self.top_k > 0


def _with_host_and_port(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname and parts.port) and f"{parts.scheme}://{parts.netloc}" == url.rstrip("/")
    except ValueError:  # brackets that do not close, a port that is none
        is_address = False
    if not is_address or not url.startswith(("http://", "https://")):
        raise ValueError(f"engine.urls has {url}: write a server as http://HOST:PORT, with a port from 1 to 65535")
    return url


ServerUrl = Annotated[str, AfterValidator(_with_host_and_port)]


class EngineConfig(Table):
    """The rollout engine: the embedded one, or servers that run by themselves (docs/engines.md)."""

    kind: Literal["local", "vllm", "sglang"] = "local"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_sequences: Positive = 1024  # decoded together; more are taken in turns
    threads: Threads = 1  # of the engine's process; threads of two processes that share a core wait for each other
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1  # engines that share every request; more than one with Ray
    start_timeout_s: AboveZero = 300
    generate_timeout_s: AboveZero = 600
    # streaming: what becomes of the keys and values of running responses when new weights arrive
    cache_on_update: Literal["keep", "rebuild"] = "keep"
    # ---- servers ----
    urls: tuple[ServerUrl, ...] = ()  # http://HOST:PORT, one or more
    pause: Literal["keep", "wait"] = "keep"  # running responses while weights are loaded: held, or waited for
    weights_dir: str = ""  # a folder that this process and the servers see; "" = in this machine's memory
    stall_timeout_s: AboveZero = 45  # without a token from a server that has requests
    recovery_timeout_s: AboveZero = 60  # without any server that does what it is asked
    # mean difference of a server's log-probabilities from those of the weights that it was sent, in nats a token
    probe_tolerance: AboveZero = 0.05

    @property
    def count(self) -> int:
        """Engines, each with the whole model."""
        return len(self.urls) or self.replicas

    @model_validator(mode="after")
    def _servers_have_a_kind(self) -> EngineConfig:
        if self.kind == "local" and self.urls:
            raise ValueError(f"engine.urls names servers ({self.urls[0]}): set engine.kind to vllm or sglang")
        if self.kind != "local" and not self.urls:
            raise ValueError(
                f'engine.kind = "{self.kind}" needs servers: set engine.urls, for example '
                '["http://127.0.0.1:8000"]; steadyrl rollout-server starts one'
            )
        if self.kind != "local" and self.cache_on_update == "rebuild":
            raise ValueError(
                'engine.cache_on_update = "rebuild" is for the embedded engine: servers keep what running responses '
                "have read; set engine.cache_on_update=keep, or engine.pause=wait to have none running"
            )
        return self


class TrainerConfig(Table):
    # local: in this process; fsdp: the model spread over `ranks` processes, with pipeline.backend = "ray"
    kind: Literal["local", "fsdp"] = "local"
    ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = cuda where there is one
    steps: Positive = 100  # optimizer steps
    lr: AboveZero = 3e-4
    lr_warmup_steps: NonNegative = 0  # optimizer steps; the rate is constant afterwards
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    eps: AboveZero = 1e-8
    weight_decay: ZeroOrMore = 0.0
    max_grad_norm: AboveZero = 1.0
    tokens_per_micro_batch: Positive = 32768  # padded tokens in one forward pass
    threads: Threads = 1


class ControllerConfig(Table):
    """Streaming: keep a measure of drift within a budget by how stale the data may become (pipeline/controller.py)."""

    measure: Literal["d_bar", "ess"] = "d_bar"
    budget: AboveZero  # of d-bar, an upper limit; of ESS, a lower one
    every_steps: Positive = 10  # optimizer steps whose mean is compared with the budget
    slack: Annotated[float, Field(gt=0, lt=1)] = 0.3  # share of the budget within which nothing is changed
    fewest_groups_in_flight: NonNegative = 0  # 0 = prompts_per_batch
    most_groups_in_flight: NonNegative = 0  # 0 = as many as max_lag has room for
    longest_broadcast_interval: Positive = 8  # optimizer steps

    @model_validator(mode="after")
    def _can_be_kept(self) -> ControllerConfig:
        fewest, most = self.fewest_groups_in_flight, self.most_groups_in_flight
        if 0 < most < fewest:
            raise ValueError(
                f"pipeline.controller.fewest_groups_in_flight = {fewest} is above most_groups_in_flight = {most}: "
                "lower the one or raise the other"
            )
        if self.measure == "ess" and self.budget > 1:
            raise ValueError(
                f"pipeline.controller.budget = {self.budget:g} cannot be reached: an effective sample size is a share "
                "of the tokens, so set it to 1 or less, for example 0.9"
            )
        return self


class PipelineConfig(Table):
    regime: Literal["sync", "batch", "streaming"] = "batch"
    lag: Lag = 1  # optimizer steps between two broadcasts of the weights; 0 with regime = "sync"
    prompts_per_batch: Positive = 32
    responses_per_prompt: Annotated[int, Field(ge=2)] = 8
    steps_per_batch: Positive = 1  # optimizer steps taken on each batch
    backend: Literal["inline", "process", "ray"] = "process"
    ray_address: str = ""  # of a Ray cluster; "" = RAY_ADDRESS, or else a cluster on this machine, for this run alone
    # Ray: trainer ranks and engines each on CPUs of their own, or a rank and an engine in turns on the same ones
    placement: Literal["separate", "shared"] = "separate"
    # ---- streaming ----
    max_lag: Lag = 8  # optimizer steps; no token is older when it is trained on
    groups_in_flight: NonNegative = 0  # prompts in the engine at a time; 0 = twice prompts_per_batch
    queue_groups: NonNegative = 0  # prompts that may wait, finished; 0 = prompts_per_batch
    rollout_timeout_s: ZeroOrMore = 0.0  # for a response, from its first step; 0 = none
    on_timeout: Literal["replace", "keep"] = "replace"  # give up the prompt and take another; or train on what there is
    controller: ControllerConfig | None = None

    @property
    def most_groups_in_flight(self) -> int:
        return self.groups_in_flight or 2 * self.prompts_per_batch

    @property
    def most_groups_outstanding(self) -> int:
        """Streaming: groups that `max_lag` has room for, in the engine or waiting."""
        return self.prompts_per_batch * (self.max_lag + 1)

    @property
    def most_ready_groups(self) -> int:
        return self.queue_groups or self.prompts_per_batch

    @property
    def responses_per_batch(self) -> int:
        return self.prompts_per_batch * self.responses_per_prompt

    @property
    def largest_lag(self) -> int:
        """The lag that no token exceeds and some token reaches, in optimizer steps (docs/staleness.md).

        With M steps per batch and a broadcast every n steps, batch k is generated from version
        n * floor((k - 1) * M / n) and trained on up to version (k + 1) * M - 1. Streaming keeps the
        bound that it is given.
        """
        steps, every = self.steps_per_batch, self.lag
        if self.regime == "streaming":
            return self.max_lag
        if self.regime == "sync":
            return steps - 1
        return 2 * steps - 1 + every - math.gcd(every, steps)


class EvaluationConfig(Table):
    """Evaluation has sampling settings of its own; it always covers the whole held-out set."""

    every_steps: NonNegative = 20  # optimizer steps; 0 = only before the first and after the last
    prompts: NonNegative = 128  # size of the held-out set; 0 = all of a data set
    samples_per_prompt: Positive = 8  # k
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # draw from the likeliest tokens with this mass; 1 = from all
    top_k: NonNegative = 0  # draw from so many of the likeliest tokens; 0 = from all
    stop: tuple[str, ...] = ()  # strings that end a response
    max_response_tokens: Positive = 32


class CheckpointConfig(Table):
    every_steps: NonNegative = 0  # optimizer steps; 0 = only at the end or when stopped
    keep: Positive = 2


class RecordConfig(Table):
    rollouts_every_batches: NonNegative = 10  # 0 = keep no rollouts
    silence_s: AboveZero = 300  # without any news, after which stalled.txt says what every thread is doing


class TrackingConfig(Table):
    """Services that get a copy of every row of the run folder (extra `trackers`)."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: Annotated[str, Field(min_length=1)] = "steadyrl"  # of Weights & Biases and trackio
    name: str = ""  # of the run there; "" = the name of its folder


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
    tracking: TrackingConfig = TrackingConfig()

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
        if pipeline.regime == "streaming":
            self._check_streaming()
        elif pipeline.controller is not None:
            raise ValueError("pipeline.controller steers a streaming run: set pipeline.regime=streaming, or remove it")
        if self.engine.kind != "local":
            self._check_servers()
        if self.engine.replicas > 1 and pipeline.backend == "process":
            raise ValueError(
                f'engine.replicas = {self.engine.replicas}, and pipeline.backend = "process" has one engine: set '
                "pipeline.backend=ray, or engine.replicas=1"
            )
        if self.trainer.kind == "fsdp" and pipeline.backend != "ray":
            raise ValueError('trainer.kind = "fsdp" trains on several processes: set pipeline.backend=ray')
        if self.trainer.ranks > 1 and self.trainer.kind != "fsdp":
            raise ValueError(
                f"trainer.ranks = {self.trainer.ranks} needs a model that is spread over them: set trainer.kind=fsdp"
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
        if self.sampling.is_restricted and self.objective.num_top_logprobs:
            raise ValueError(
                "the objective compares whole distributions, and with sampling.top_p or sampling.top_k the engine does "
                "not draw from a whole one: set sampling.top_p=1 and sampling.top_k=0, or choose an objective that "
                "needs the sampled tokens only"
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

    def _check_servers(self) -> None:
        if self.pipeline.backend == "inline" or self.engine.replicas > 1:
            raise ValueError(
                f'engine.kind = "{self.engine.kind}" has its engines at engine.urls, and they work beside the trainer: '
                "set pipeline.backend=process, or ray for several trainer ranks, and engine.replicas=1"
            )
        if self.objective.num_top_logprobs:
            raise ValueError(
                "the objective compares whole distributions, which servers do not return: set engine.kind=local, or "
                "choose an objective that needs the sampled tokens only"
            )
        if self.sampling.top_p < 1 and self.sampling.top_k == 0:
            raise ValueError(
                "servers say what top-p leaves only together with top-k: set sampling.top_k as well, for example to "
                "1000, or sampling.top_p=1"
            )

    def _check_streaming(self) -> None:
        pipeline = self.pipeline
        if not 1 <= pipeline.lag <= pipeline.max_lag + 1:
            raise ValueError(
                f"pipeline.lag = {pipeline.lag}: with weights that are broadcast so seldom no token can be trained on "
                f"within pipeline.max_lag = {pipeline.max_lag}; set pipeline.lag from 1 to {pipeline.max_lag + 1}"
            )
        if pipeline.steps_per_batch != 1:
            raise ValueError(
                f"pipeline.steps_per_batch = {pipeline.steps_per_batch} is for batches that are generated whole: with "
                "pipeline.regime=streaming set it to 1, and pipeline.prompts_per_batch to the prompts of a step"
            )
        if 0 < pipeline.groups_in_flight < pipeline.prompts_per_batch:
            raise ValueError(
                f"pipeline.groups_in_flight = {pipeline.groups_in_flight} cannot fill a step of "
                f"pipeline.prompts_per_batch = {pipeline.prompts_per_batch}: raise it to that or more, or set 0"
            )
        most = pipeline.most_groups_outstanding
        if pipeline.controller and pipeline.controller.fewest_groups_in_flight > most:
            raise ValueError(
                f"pipeline.controller.fewest_groups_in_flight = {pipeline.controller.fewest_groups_in_flight} is more "
                f"than pipeline.max_lag ever lets in, {most}: set it to that or less"
            )
        if self.objective.anchor == "old_actor":
            raise ValueError(
                'objective.anchor = "old_actor" needs one set of weights that sampled a batch, and with '
                "pipeline.regime=streaming every token has its own: use objective.anchor=rollout or prox_approx"
            )

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
            + (" into the running generation" if pipeline.regime == "streaming" else "")
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
