"""From a configuration to a finished run: the one place where the parts are introduced to each other."""

from __future__ import annotations

import functools
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import RunConfig
from steadyrl.continuation import checkpoint_to_resume, new_folder, rewind
from steadyrl.engines.build import PROBE_PROMPTS, build_local_engine, build_remote_engine
from steadyrl.errors import CheckpointError, ConfigError, LearnerLostError, SteadyRLError
from steadyrl.evaluation.evaluate import evaluation_request, score
from steadyrl.models.load import context_length, load_policy, load_tokenizer
from steadyrl.models.routing import routers
from steadyrl.pipeline.backend import Backend, EngineSpec
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.inline_backend import InlineBackend
from steadyrl.pipeline.loop import TrainingLoop
from steadyrl.pipeline.process_backend import ProcessBackend
from steadyrl.pipeline.ray_backend import RayBackend
from steadyrl.pipeline.ray_cluster import RayCluster, open_cluster
from steadyrl.pipeline.ray_learner import RayLearner
from steadyrl.pipeline.seeds import stream_seed
from steadyrl.pipeline.thread_backend import ThreadBackend
from steadyrl.pipeline.watchdog import Watchdog
from steadyrl.reports.progress import TrainingProgress
from steadyrl.reports.recorder import CHECKPOINTS, RunFolder
from steadyrl.reports.trackers import Tracking, check_installed
from steadyrl.tasks.base import Task
from steadyrl.tasks.build import build_task
from steadyrl.tasks.data_record import check_same_data, describe, store_data
from steadyrl.trainer.base import Learner
from steadyrl.trainer.checkpoint import latest_checkpoint, load_state
from steadyrl.trainer.learner import LocalLearner
from steadyrl.types import GenerationRequest, Prompt, Rollout, RolloutBatch, StepReport

logger = logging.getLogger(__name__)
STALLED = "stalled.txt"
MAX_RESTARTS = 3  # after a trainer rank died, without a newer checkpoint in between


@dataclass(frozen=True)
class RunResult:
    folder: Path
    finished: bool  # False: stopped on request, to be continued with --resume


def train(config: RunConfig, *, resume: bool = False, progress: TrainingProgress | None = None) -> RunResult:
    """Run a configuration to its end, or until Ctrl-C or SIGTERM; returns where the run was written.

    Where a trainer rank dies (Ray), the run goes on from its newest checkpoint, as `resume` does.

    Raises:
        ConfigError: something does not fit; nothing was started.
        SteadyRLError: the run ended early; what it had produced is in the run folder.
    """
    torch.set_num_threads(config.trainer.threads)
    check_installed(config.tracking)
    progress = progress or TrainingProgress()
    restarts, restarted_from = 0, -1
    while True:
        result = _attempt(config, resume, progress)
        if isinstance(result, RunResult):
            return result
        try:
            step = load_state(latest_checkpoint(result.folder / CHECKPOINTS))["step"]
        except CheckpointError as error:
            raise LearnerLostError(
                f"{result.error}. It cannot go on: {error}; set checkpoint.every_steps for the next run"
            ) from result.error
        restarts = 1 if step > restarted_from else restarts + 1
        if restarts > MAX_RESTARTS:
            raise result.error
        progress.message(f"{result.error}: going on from the checkpoint of step {step}")
        restarted_from, resume = step, True
        config = config.model_copy(update={"run_dir": str(result.folder)})


@dataclass(frozen=True)
class _Lost:
    folder: Path
    error: LearnerLostError


def _attempt(config: RunConfig, resume: bool, progress: TrainingProgress) -> RunResult | _Lost:
    """A run, from its start or its newest checkpoint, until it ends or loses a trainer rank."""
    with ExitStack() as held:
        folder = held.enter_context(RunFolder.open(config.run_dir)) if resume else None
        checkpoint = checkpoint_to_resume(config) if resume else None
        tokenizer = load_tokenizer(config.model.path)
        model = load_policy(config.model)
        task = held.enter_context(closing(build_task(config.task, tokenizer, config.seed)))
        evaluation = HeldOut(task, evaluation_request(task, config.evaluation, stream_seed(config.seed, "evaluation")))
        _check_model(config, model, evaluation.held_out.prompts, task.prompts("train", 0, 1))
        cluster: RayCluster | None = None
        if config.pipeline.backend == "ray":
            weight_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
            del model  # the ranks load their own
            cluster = held.enter_context(open_cluster(config, weight_bytes, progress.message))
            learner = held.enter_context(closing(RayLearner(config, cluster)))
        else:
            learner = LocalLearner(model, tokenizer, config)
        if folder is None or checkpoint is None:
            folder = held.enter_context(new_folder(config))
            store_data(folder.path, task.data)
        else:
            check_same_data(folder.path, task.data)
            rewind(folder, config, checkpoint)
        for sentence in describe(task.data):
            progress.message(sentence)
        tracking = held.enter_context(Tracking(config, folder.path, progress.message))
        observer = _Observer(folder, progress, tracking, tokenizer, config.record.silence_s)
        try:
            finished = _train(config, folder, checkpoint, learner, cluster, task, evaluation, observer, progress)
        except LearnerLostError as error:
            return _Lost(folder.path, error.with_traceback(None))  # whose frames hold the weights
        return RunResult(folder.path, finished)


def _train(
    config: RunConfig,
    folder: RunFolder,
    checkpoint: Path | None,
    learner: Learner,
    cluster: RayCluster | None,
    task: Task,
    evaluation: HeldOut,
    observer: _Observer,
    progress: TrainingProgress,
) -> bool:
    """Run the loop, and leave in the folder how it ended."""
    start_step = load_state(checkpoint)["step"] if checkpoint else 0
    folder.status("running")
    try:
        with _stop_on_signal(progress) as stop, progress, observer.watchdog:
            backend = build_backend(config, learner, cluster, task, progress.message)
            try:
                progress.start(config.model_copy(update={"run_dir": str(folder.path)}), start_step)
                loop = TrainingLoop(
                    config,
                    learner=learner,
                    backend=backend,
                    task=task,
                    evaluation=evaluation,
                    observer=observer,
                    checkpoints=folder.path / CHECKPOINTS,
                    stop=stop,
                )
                observer.watchdog.describe_with(loop.describe)
                if checkpoint:
                    loop.resume(checkpoint)
                finished = loop.run()
            finally:
                backend.close()
    except BaseException as error:
        with suppress(SteadyRLError):  # a full disk must not hide what went wrong
            folder.status("failed", error=str(error) or repr(error), traceback=traceback.format_exc())
        raise
    folder.status("finished" if finished else "stopped", step=learner.version)
    return finished


def build_backend(
    config: RunConfig, learner: Learner, cluster: RayCluster | None, task: Task, tell: Callable[[str], None]
) -> Backend:
    engine, dtype, pipeline = config.engine, config.engine.dtype, config.pipeline
    stragglers = Stragglers(pipeline.rollout_timeout_s, are_kept=pipeline.on_timeout == "keep")
    if engine.kind != "local":
        remote = build_remote_engine(config, task.prompts("train", 0, PROBE_PROMPTS))
        try:  # whatever does not fit shows before the first step
            weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in learner.named_weights().items()}
            remote.load_weights(weights, learner.version)
        except BaseException:
            remote.close()
            raise
        tell(f"rollout servers that hold the weights: {remote.describe()}")
        return ThreadBackend(remote, getattr(torch, dtype), stragglers, engine.generate_timeout_s)
    if config.pipeline.backend == "inline":
        local = build_local_engine(
            config.model.path, dtype, engine.max_sequences, config.model.routing_replay, engine.cache_on_update
        )
        return InlineBackend(local, getattr(torch, dtype), stragglers, engine.replicas)
    spec = EngineSpec(
        model_path=config.model.path,
        dtype=dtype,
        max_sequences=engine.max_sequences,
        records_routing=config.model.routing_replay,
        threads=engine.threads,
        start_timeout_s=engine.start_timeout_s,
        generate_timeout_s=engine.generate_timeout_s,
        cache_on_update=engine.cache_on_update,
        stragglers=stragglers,
    )
    if cluster is not None:
        return RayBackend(spec, cluster, tell)
    return ProcessBackend(spec, learner.named_weights())


@dataclass(frozen=True)
class HeldOut:
    """The evaluation on the held-out prompts; the random numbers are the same every time, so scores pair up."""

    task: Task
    held_out: GenerationRequest

    def request(self) -> GenerationRequest:
        return self.held_out

    def score(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        row = score(self.task, self.held_out, rollouts)
        return {"step": row["version"], **row}


class _Observer:
    """Writes everything to the run folder, shows and tracks it. Times become seconds since the run began."""

    def __init__(
        self,
        folder: RunFolder,
        progress: TrainingProgress,
        tracking: Tracking,
        tokenizer: PreTrainedTokenizerBase,
        silence_s: float,
    ) -> None:
        self._folder = folder
        self._token_text = functools.cache(lambda token: str(tokenizer.decode([token])))
        self._progress = progress
        self._tracking = tracking
        self.watchdog = Watchdog(folder.path / STALLED, silence_s, progress.message)
        self._origin_s = time.monotonic()

    def step(self, report: StepReport) -> None:
        self._folder.step(report)
        self._progress.step(report)
        self._tracking.step(report)

    def rollouts(self, batch: RolloutBatch) -> None:
        self._folder.rollouts(batch, self._token_text)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def evaluation(self, row: dict[str, Any]) -> None:
        self._folder.evaluation(row)
        self._progress.evaluation(row)
        self._tracking.evaluation(row)

    def event(self, actor: Any, phase: str, start_s: float, end_s: float, step: int) -> None:
        self._folder.event(actor, phase, start_s - self._origin_s, end_s - self._origin_s, step)
        self.watchdog.progress()


def _check_model(
    config: RunConfig, model: PreTrainedModel, held_out: Sequence[Prompt], first_trained: Sequence[Prompt]
) -> None:
    if config.model.routing_replay:
        routers(model)
    _check_length(model, held_out, "evaluation.max_response_tokens", config.evaluation.max_response_tokens)
    if config.sampling.long_prompts == "refuse":
        _check_length(model, first_trained, "sampling.max_response_tokens", config.sampling.max_response_tokens)


def _check_length(model: PreTrainedModel, prompts: Sequence[Prompt], key: str, response_tokens: int) -> None:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + response_tokens > context_length(model):
        raise ConfigError(
            f"a prompt of {longest} tokens and a response of {response_tokens} do not fit into the model's "
            f"{context_length(model)} positions: lower {key}"
        )


@contextmanager
def _stop_on_signal(progress: TrainingProgress) -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a polite request; a second one interrupts at once."""
    asked = False

    def ask(signum: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        progress.message(f"{signal.Signals(signum).name}: finishing this optimizer step, then writing a checkpoint")

    previous = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, ask)
    except ValueError:
        logger.debug("not in the main thread: signals are left alone")
    try:
        yield lambda: asked
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
