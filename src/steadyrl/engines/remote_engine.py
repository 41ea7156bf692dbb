"""Rollout servers as one engine: tokens in, tokens and log-probabilities out, and weights that provably arrived.

What a server says is checked before it becomes a rollout (`completion_check.py`). Whom to ask, and what becomes of a
server that fails, is up to `server_pool.py`. After each broadcast, and whenever a server comes back, it samples a few
responses that a copy of the weights scores in this process (`server_check.py`): only then it is trusted.

Servers draw their own random numbers: the same request gives other responses the next time.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import EngineConfig
from steadyrl.engines.dialect import Completion, Dialect, ServerFault
from steadyrl.engines.event_loop import EventLoopThread
from steadyrl.engines.server import Job, Patience, Weights
from steadyrl.engines.server_check import ServerCheck
from steadyrl.engines.server_pool import ServerPool
from steadyrl.engines.stop_strings import stopped_text
from steadyrl.engines.weight_folder import WeightFolder
from steadyrl.errors import EngineError
from steadyrl.types import Finish, GenerationRequest, Prompt, Rollout

logger = logging.getLogger(__name__)
STEP_S = 0.05  # how long `step` waits for news
CLOSE_TIMEOUT_S = 5.0
ABORT_S = 10.0  # for a server to end a response that was canceled


def patience(config: EngineConfig) -> Patience:
    return Patience(
        request_s=config.generate_timeout_s,
        weights_s=config.generate_timeout_s,
        start_s=config.start_timeout_s,
        stall_s=config.stall_timeout_s,
        recovery_s=config.recovery_timeout_s,
    )


class RemoteEngine:
    """A `StreamingEngine` on servers.

    Args:
        config: the servers, and what may take how long.
        dialect: what the servers speak.
        mirror: a model of the trainer's architecture in the engine's dtype; holds what was broadcast, for this engine
            alone.
        tokenizer: gives responses their text.
        probe: what a server samples to show which weights it holds, with the sampling settings of the run.
        records_routing: ask for the experts of every token.

    Raises:
        ConfigError: there is no place for the weights.
        EngineError: a server does not answer, or is not what the run needs.
    """

    def __init__(
        self,
        config: EngineConfig,
        dialect: Dialect,
        mirror: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        probe: GenerationRequest,
        *,
        records_routing: bool,
        waits: Patience | None = None,
    ) -> None:
        self.version = -1  # nothing broadcast yet
        self._config = config
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._records_routing = records_routing
        self._waits = waits or patience(config)
        self._run = secrets.token_hex(4)  # so that weights of another run are not taken for those of this one
        self._request_numbers = itertools.count()
        self._response_ids = itertools.count()
        self._check = ServerCheck(config, dialect, mirror, tokenizer, probe, records_routing=records_routing)
        self._jobs: dict[int, Job] = {}  # of responses that were submitted and have not arrived
        self._answers: dict[Job, Future[list[Rollout]]] = {}
        self._arrived: queue.SimpleQueue[tuple[Job, list[int]]] = queue.SimpleQueue()
        self._finished: dict[int, Rollout] = {}  # not handed out yet
        self._checksum = ""
        self._folder = WeightFolder(config.weights_dir, f"steadyrl-weights-{self._run}")
        self._loop = EventLoopThread("steadyrl-servers")
        self._pool = self._loop.run(self._make_pool())
        try:
            self._loop.run(self._pool.connect())
        except BaseException:
            self.close()
            raise

    async def _make_pool(self) -> ServerPool:
        return ServerPool(
            self._config.urls,
            self._dialect,
            self._waits,
            pause=self._config.pause,
            most_responses=self._config.max_sequences,
            routed_experts=self._records_routing,
            examine=self._check.examine,
            verify=self._check.verify,
            check=self._check.check,
        )

    def close(self) -> None:
        """Ends whatever waits for a server, in any thread; the servers run on."""
        try:
            self._loop.start(self._pool.close()).result(CLOSE_TIMEOUT_S)
        except Exception as error:
            logger.debug("while closing: %s", error)
        self._loop.close()
        self._folder.close()

    def describe(self) -> str:
        """The servers, in a few words each."""
        return "; ".join(f"{server.software} at {server.url}" for server in self._pool.servers)

    def metrics(self) -> dict[str, float]:
        return {"engine/retries": float(self._pool.retries), "engine/outages": float(self._pool.outages)}

    # ---- weights ----

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Bring weights into the servers; returns `weights_checksum` of what was sent, in the mirror's dtype.

        Responses may be running: they are paused, and go on under the new weights or are waited for, as the
        configuration says.

        Raises:
            EngineError: names or shapes that do not map one to one; or no server holds the weights now, as shown by
                what it samples. The version is what it was.
        """
        tag = f"{self._run}.{version}"
        checksum = self._check.take(weights, tag)
        if (version, checksum) == (self.version, self._checksum):
            return checksum
        try:
            folder = self._folder.write(self._check.mirror, tag)
        except OSError as error:
            raise EngineError(
                f"the weights of version {version} could not be written to {self._folder.path} ({error}): make room, "
                "or set engine.weights_dir to another folder that the rollout servers can read"
            ) from None
        self._loop.run(self._pool.broadcast(Weights(folder, tag)))
        self._folder.keep_only(tag)
        self.version, self._checksum = version, checksum
        return checksum

    # ---- responses ----

    def generate(self, request: GenerationRequest) -> list[Rollout]:
        """See `base.Engine`. A response for which no server gives an answer that can be used has `finish="error"`."""
        futures = [self._loop.start(self._answer(job, group)) for job, group in self._make_jobs(request)]
        return [rollout for future in futures for rollout in future.result()]

    def submit(self, request: GenerationRequest) -> list[int]:
        """See `base.StreamingEngine`; the servers draw other random numbers each time."""
        ids = []
        for job, group in self._make_jobs(request):
            responses = [next(self._response_ids) for _ in range(request.samples_per_prompt)]
            self._jobs |= dict.fromkeys(responses, job)
            future = self._loop.start(self._answer(job, group))
            self._answers[job] = future
            future.add_done_callback(lambda _, job=job, responses=responses: self._arrived.put((job, responses)))
            ids += responses
        return ids

    def step(self) -> dict[int, Rollout]:
        """Wait a moment for responses; those that were finished since the last call, by id.

        Raises:
            EngineError: there is no server left to ask.
        """
        self._receive(wait_s=0.0 if self._finished else STEP_S)
        finished, self._finished = self._finished, {}
        return finished

    def cancel(self, sequence_id: int) -> Rollout:
        """End a response, and with it those to the same prompt: a server is asked for them together.

        `finish` is "canceled" unless the response was finished on the server. One that waited, or whose server does
        not say what there is of it, has no tokens.
        """
        if sequence_id not in self._finished:
            self._loop.run(self._pool.cancel(self._jobs[sequence_id], ABORT_S))
        while sequence_id not in self._finished:
            self._receive(wait_s=STEP_S)
        return self._finished.pop(sequence_id)

    def overdue(self, *, tokens: int | None = None, seconds: float | None = None) -> list[int]:
        """See `base.StreamingEngine`. A server does not say how many tokens a running response has."""
        assert tokens is None, "servers keep the number of tokens to themselves"
        if seconds is None:
            return []
        since = time.monotonic() - seconds
        return [
            response for response, job in self._jobs.items() if job.started_s is not None and job.started_s <= since
        ]

    @property
    def num_running(self) -> int:
        return sum(job.started_s is not None for job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) - self.num_running

    def _make_jobs(self, request: GenerationRequest) -> list[tuple[Job, int]]:
        limit = self._check.context_length
        jobs = []
        for group, prompt in enumerate(request.prompts):
            if len(prompt.token_ids) + request.max_response_tokens > limit and request.long_prompts == "refuse":
                raise EngineError(
                    f"{prompt.prompt_id} has {len(prompt.token_ids)} tokens; with a response of "
                    f"{request.max_response_tokens} it does not fit into the {limit} positions of the rollout servers: "
                    'lower sampling.max_response_tokens, or set sampling.long_prompts="drop" to train without such '
                    "prompts"
                )
            jobs.append((Job(f"{self._run}.{next(self._request_numbers)}", prompt, request), group))
        return jobs

    def _receive(self, wait_s: float) -> None:
        """Take in what has arrived; waits for the first of it."""
        while True:
            try:
                job, responses = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
            except queue.Empty:
                return
            rollouts = self._answers.pop(job).result()
            for response, rollout in zip(responses, rollouts, strict=True):
                del self._jobs[response]
                self._finished[response] = rollout
            wait_s = 0.0

    async def _answer(self, job: Job, group: int) -> list[Rollout]:
        prompt, request = job.prompt, job.request
        none = Completion([], [], "canceled", [])
        size = request.samples_per_prompt
        if len(prompt.token_ids) + request.max_response_tokens > self._check.context_length:
            return [self._rollout(prompt, request, group, none, finish="too_long") for _ in range(size)]
        try:
            completions = await self._pool.generate(job)
        except ServerFault as fault:
            logger.warning("no response to %s: %s", prompt.prompt_id, fault)
            return [self._rollout(prompt, request, group, none, finish="error") for _ in range(size)]
        return [self._rollout(prompt, request, group, completion) for completion in completions or [none] * size]

    def _rollout(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        group: int,
        completion: Completion,
        finish: Finish | None = None,
    ) -> Rollout:
        tokens = completion.token_ids
        p, n = len(prompt.token_ids), len(tokens)
        versions = [
            int(span.version.rpartition(".")[2]) for span in completion.spans for _ in range(span.start, span.end)
        ]
        support = completion.support
        return Rollout(
            prompt_id=prompt.prompt_id,
            group=group,
            token_ids=np.concatenate([prompt.token_ids, np.asarray(tokens, np.int32)]),
            loss_mask=np.arange(p + n) >= p,
            behavior_logp=np.concatenate([np.zeros(p, np.float32), np.asarray(completion.logp, np.float32)]),
            versions=np.concatenate([np.full(p, -1, np.int32), np.asarray(versions, np.int32)]),
            routed_experts=completion.routed_experts,
            finish=finish or completion.finish,
            text=self._text(tokens, request.stop),
            prompt_text=prompt.text,
            support_ids=None if support is None else np.asarray([i for ids in support for i in ids], np.int32),
            support_lengths=None if support is None else np.asarray([0] * p + [len(i) for i in support], np.int32),
        )

    def _text(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Of a response, up to and with the stop string that ended it."""
        text = stopped_text(tokens, stop, self._decode) if stop and tokens else None
        return self._decode(tokens) if text is None else text

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
