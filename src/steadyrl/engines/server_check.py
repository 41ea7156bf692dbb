"""Is a server the right one, does it hold the right weights, was its answer one that can be true?

A copy of what was broadcast, the *mirror*, lives in this process. A server samples a few responses to the probe, and
the mirror scores them (`contract.py`): a server whose log-probabilities are others does not hold these weights,
whatever it says. The name of the weights that a server gives with each token says which broadcast they came from
(`completion_check.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import EngineConfig
from steadyrl.engines.base import assign_weights
from steadyrl.engines.completion_check import check_completions
from steadyrl.engines.contract import Reference, difference, sampling_difference, score
from steadyrl.engines.dialect import Completion, Dialect, ServerFault, ServerInfo
from steadyrl.engines.server import Job, Server, Weights
from steadyrl.models.load import context_length
from steadyrl.types import GenerationRequest


class ServerCheck:
    """See the module.

    Args:
        mirror: a model of the trainer's architecture in the engine's dtype, for this object alone.
        tokenizer: of the trainer.
        probe: what a server samples, with the sampling settings of the run.
        records_routing: whether the run needs the experts of every token.
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
    ) -> None:
        self.mirror = mirror.requires_grad_(False)
        self.context_length = context_length(mirror)  # tokens of prompt and response that mirror and servers take
        self._config = config
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._probe = probe
        self._records_routing = records_routing
        self._tag = ""  # of the weights in the mirror
        self._lock = threading.Lock()  # around the mirror
        self._numbers = itertools.count()

    def take(self, weights: Mapping[str, Tensor], tag: str) -> str:
        """Copy weights into the mirror; the checksum is of what it then holds.

        Raises:
            EngineError: names or shapes that do not map one to one; the mirror is as it was.
        """
        with self._lock:
            checksum = assign_weights(self.mirror, weights)
            self._tag = tag
            return checksum

    def examine(self, server: Server, info: ServerInfo) -> None:
        """Raises ServerFault where a server says that it is not what the run needs."""
        if info.dtype is not None and info.dtype != self._config.dtype:
            raise ServerFault(
                f"it runs in {info.dtype}, and engine.dtype is {self._config.dtype}: start it with --dtype "
                f"{self._config.dtype}, or set engine.dtype={info.dtype}"
            )
        restricted = self._probe.top_p < 1 or self._probe.top_k > 0
        wanted = {"processed"} if restricted else {"processed", "tempered"}
        wanted |= {"raw"} if self._probe.temperature == 1 and not restricted else set()
        if info.logprobs is not None and info.logprobs not in wanted:
            raise ServerFault(
                f"it reports {info.logprobs} log-probabilities, not those of the distribution that it samples from at "
                f"temperature {self._probe.temperature:g} and top-p {self._probe.top_p:g}: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if self._records_routing and not info.returns_routed_experts:
            raise ServerFault(
                "it does not return routed experts, which model.routing_replay needs: start it with "
                "--enable-return-routed-experts, or set model.routing_replay=false"
            )
        if restricted and not info.returns_support:
            raise ServerFault(
                "it does not say which tokens top-p or top-k leave, so that the trainer could not compute its "
                "log-probabilities: set sampling.top_p=1 and sampling.top_k=0, or start it with --return-sampling-mask"
            )
        if info.context_length is not None:
            self.context_length = min(self.context_length, info.context_length)

    async def verify(self, server: Server, weights: Weights) -> None:
        """Raises ServerFault unless what the server samples now has the log-probabilities of these weights."""
        is_new = server.holds is None
        timeout_s = self._config.stall_timeout_s
        if is_new:
            await self._check_tokenizer(server, timeout_s)
        request = self._probe
        answers = await asyncio.gather(
            *(
                self._dialect.generate(
                    server.client,
                    f"{weights.tag}.probe-{next(self._numbers)}",
                    prompt,
                    request,
                    weights=weights.tag,
                    routed_experts=self._records_routing,
                    timeout_s=timeout_s,
                )
                for prompt in request.prompts
            )
        )
        for prompt, completions in zip(request.prompts, answers, strict=True):
            self._check(len(prompt.token_ids), request, completions, {weights.tag})
        reference = await asyncio.to_thread(self._score, weights, answers)
        reported = np.array([logp for answer in answers for completion in answer for logp in completion.logp])
        tolerance = self._config.probe_tolerance
        why = difference(reported, reference, tolerance)
        if why is None and is_new:
            why = sampling_difference(reference, tolerance)
        if why is not None:
            raise ServerFault(f"after it took over the weights {weights.tag}, {why}")

    def _score(self, weights: Weights, answers: Sequence[Sequence[Completion]]) -> Reference:
        request = self._probe
        with self._lock:
            if self._tag != weights.tag:
                raise ServerFault("newer weights are on their way")
            sequences = [
                (prompt.token_ids.tolist(), completion.token_ids)
                for prompt, answer in zip(request.prompts, answers, strict=True)
                for completion in answer
            ]
            return score(
                self.mirror,
                sequences,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
            )

    async def _check_tokenizer(self, server: Server, timeout_s: float) -> None:
        for prompt in self._probe.prompts:
            text = str(self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=True))
            theirs = await self._dialect.tokenize(server.client, text, timeout_s=timeout_s)
            ours = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            if theirs is not None and list(theirs) != ours:
                raise ServerFault(
                    f"its tokenizer makes {list(theirs)[:8]}... of {text[:40]!r}, and that of model.path "
                    f"{ours[:8]}...: start it with the model of model.path"
                )

    def check(self, job: Job, server: Server, completions: Sequence[Completion]) -> None:
        """Raises ServerFault unless this is an answer to the job from weights that were verified on this server."""
        self._check(len(job.prompt.token_ids), job.request, completions, server.verified)

    def _check(
        self, prompt_tokens: int, request: GenerationRequest, completions: Sequence[Completion], versions: set[str]
    ) -> None:
        check_completions(
            completions,
            prompt_tokens=prompt_tokens,
            request=request,
            versions=versions,
            routed_experts=self._records_routing,
        )
