"""SGLang: its routes for token-in, token-out generation and for weights, as of 0.5.23.

    GET  /model_info, /server_info, /metrics      POST /pause_generation, /continue_generation
    POST /generate, /abort_request, /tokenize     POST /update_weights_from_disk

Its log-probabilities are those after the temperature, over all tokens. Where top-k or top-p restrict the draw, a
request asks for the sampling mask, and for the log-probability among its tokens: that is what was sampled from.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steadyrl.config import RunConfig
from steadyrl.engines.common_routes import counter, tokenize, version_spans
from steadyrl.engines.dialect import Completion, HttpClient, Pause, ServerFault, ServerInfo
from steadyrl.types import GenerationRequest, Prompt

INFO_S = 60.0
SHORT_S = 20.0
LEAST_LOGP = -1e4  # SGLang writes the least number of its dtype for -inf
SPARE = 16  # responses beyond those of the run: weights are verified while all others are running
MASK_TOKENS = 4096  # that SGLang's sampling mask has room for, unless it is told otherwise
TOKEN_COUNT = "sglang:realtime_tokens_total"
FINISH: dict[str, Literal["stop", "length", "canceled"]] = {"stop": "stop", "length": "length", "abort": "canceled"}


@dataclass(frozen=True)
class MoeLayers:
    """Which layers have experts. SGLang reports a row for every layer, and no shape."""

    numbers: tuple[int, ...]  # from 0, ascending
    experts_per_token: int


class SglangDialect:
    """A `Dialect`. It remembers the names of running requests: SGLang has no request with several responses to abort.

    Args:
        eos_token_ids: each of them ends a response.
        moe: of the model; needed where routed experts are asked for.
    """

    name = "sglang"

    def __init__(self, eos_token_ids: Sequence[int], moe: MoeLayers | None = None) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._moe = moe
        self._running: dict[str, list[str]] = {}  # by the request of `generate`

    async def info(self, client: HttpClient) -> ServerInfo:
        """See `dialect.Dialect`. An environment variable decides about log-probabilities: the server does not tell."""
        model = await client.get("/model_info", timeout_s=INFO_S)
        server = await client.get("/server_info", timeout_s=INFO_S)
        if "weight_version" not in model:
            raise ServerFault("GET /model_info: there is no weight_version in the answer")
        dtype = str(server.get("dtype", "auto")).removeprefix("torch.")
        return ServerInfo(
            software=f"sglang {server.get('version')}",
            model=str(model.get("model_path")),
            weight_version=str(model["weight_version"]),
            context_length=server.get("context_length"),
            logprobs=None,
            dtype=None if dtype == "auto" else dtype,
            returns_routed_experts=bool(server.get("enable_return_routed_experts")),
            returns_support="sampling_mask_max_tokens" in server,
        )

    async def progress(self, client: HttpClient, *, timeout_s: float) -> float | None:
        """See `dialect.Dialect`. Prompts that are read count as well; None from a server without --enable-metrics."""
        # GET /health samples a token, and so has no answer from a server that is paused
        await client.get("/model_info", timeout_s=timeout_s)
        with suppress(ServerFault):
            return await counter(client, TOKEN_COUNT, timeout_s=timeout_s)
        return None

    async def generate(
        self,
        client: HttpClient,
        request_id: str,
        prompt: Prompt,
        request: GenerationRequest,
        *,
        weights: str,
        routed_experts: bool,
        timeout_s: float,
    ) -> list[Completion]:
        """See `dialect.Dialect`. One request for each response: SGLang names the responses of a common one itself."""
        moe = self._moe if routed_experts else None
        assert moe is not None or not routed_experts, "the dialect was made without the model's MoE layers"
        restricted = request.top_p < 1 or request.top_k > 0
        body = {
            "input_ids": prompt.token_ids.tolist(),
            "sampling_params": self._sampling(request),
            "return_logprob": not restricted,
            "return_routed_experts": routed_experts,
            # prefixes that other weights have read stay cached under other keys, and are never asked for again
            "extra_key": weights,
        }
        if restricted:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        # an abort ends every request whose name begins with the given one: no name begins with another
        names = [f"{request_id}-{i}." for i in range(request.samples_per_prompt)]
        self._running[request_id] = names
        tasks = [
            asyncio.create_task(client.post("/generate", {"rid": name, **body}, timeout_s=timeout_s)) for name in names
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            del self._running[request_id]
            for task in tasks:  # SGLang ends a response that nobody waits for
                task.cancel()
        try:
            return [_completion(answer, len(prompt.token_ids), restricted, moe) for answer in answers]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"POST /generate: the answer cannot be read: {error!r}") from None

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """See `dialect.Dialect`."""
        names = self._running.get(request_id, [])
        await asyncio.gather(*(client.post("/abort_request", {"rid": name}, timeout_s=SHORT_S) for name in names))

    async def pause(self, client: HttpClient, mode: Pause, *, timeout_s: float) -> None:
        """See `dialect.Dialect`. "wait" is what `load` does by itself where the server is not paused."""
        if mode == "keep":
            await client.post("/pause_generation", {"mode": "in_place"}, timeout_s=timeout_s)

    async def load(self, client: HttpClient, folder: Path, version: str, *, timeout_s: float) -> None:
        """See `dialect.Dialect`. Prefixes are told apart by `extra_key`; SGLang drops those that are not asked for."""
        body = {
            "model_path": str(folder),
            "weight_version": version,
            # with held responses it cannot: the server would load the weights, and then answer that it failed
            "flush_cache": False,
        }
        answer = await client.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        if answer.get("success") is not True:
            raise ServerFault(f"POST /update_weights_from_disk: {answer.get('message')}")

    async def resume(self, client: HttpClient) -> None:
        """See `dialect.Dialect`."""
        await client.post("/continue_generation", {}, timeout_s=SHORT_S)

    async def tokenize(self, client: HttpClient, text: str, *, timeout_s: float) -> list[int] | None:
        """See `dialect.Dialect`."""
        return await tokenize(client, text, timeout_s=timeout_s)

    def _sampling(self, request: GenerationRequest) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_new_tokens": request.max_response_tokens,
            "min_new_tokens": request.min_response_tokens,
            "stop_token_ids": self._eos_token_ids,
            "no_stop_trim": True,
        }
        return sampling | ({"stop": list(request.stop)} if request.stop else {})


def _completion(answer: dict[str, Any], prompt_tokens: int, restricted: bool, moe: MoeLayers | None) -> Completion:
    meta = answer["meta_info"]
    finish = FINISH.get(meta["finish_reason"]["type"])
    if finish is None:
        raise ValueError(f"finish reason {meta['finish_reason']!r}")
    tokens = [int(token) for token in answer["output_ids"]]
    support = None
    if restricted:
        logp = meta.get("output_token_sampling_logprobs") or []
        support = meta.get("output_token_sampling_mask") or []
    else:
        entries = meta.get("output_token_logprobs") or []
        logp = [entry[0] for entry in entries]
        if any(entry[1] != token for entry, token in zip(entries, tokens, strict=False)):
            raise ValueError("log-probabilities of other tokens")
    spans = meta.get("weight_versions")
    if tokens and spans is None:
        raise ValueError("no weight_versions: SGLang 0.5.23 or newer gives them")
    experts = meta.get("routed_experts") if moe else None
    return Completion(
        token_ids=tokens,
        logp=[math.nan if value is None or value < LEAST_LOGP else float(value) for value in logp],
        finish=finish,
        spans=version_spans(spans),
        routed_experts=_experts(experts, prompt_tokens + len(tokens) - 1, moe) if experts and moe else None,
        support=support,
    )


def _experts(text: str, rows: int, moe: MoeLayers) -> NDArray[Any]:
    """[rows, L, K] of the layers that have experts, from int32 [rows, all layers, K]."""
    numbers = np.frombuffer(base64.b64decode(text), np.int32).reshape(rows, -1, moe.experts_per_token)
    chosen = numbers[:, list(moe.numbers)]
    if chosen.min() < 0 or chosen.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"expert numbers from {chosen.min()} to {chosen.max()}")
    return chosen.astype(np.uint8 if chosen.max() <= np.iinfo(np.uint8).max else np.uint16)


def launch_command(config: RunConfig, model: str, host: str, port: int, *, python: str = sys.executable) -> list[str]:
    """The command that serves the model at `model` the way a run with this configuration needs it.

    Its environment is `launch_environment`.
    """
    engine, sampling = config.engine, config.sampling
    options = {
        "--model-path": model,
        "--host": host,
        "--port": str(port),
        "--dtype": engine.dtype,
        "--max-running-requests": str(engine.max_sequences + SPARE),
    }
    if sampling.is_restricted:  # with room for tokens that are as likely as the last one
        options["--sampling-mask-max-tokens"] = str(max(MASK_TOKENS, 2 * sampling.top_k))
    flags = ["--enable-metrics"]
    if config.model.routing_replay:
        flags.append("--enable-return-routed-experts")
    words = [word for option in options.items() for word in option]
    return [python, "-m", "sglang.launch_server", *words, *flags]


def launch_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that the server needs beside those that are there."""
    return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "OMP_NUM_THREADS": str(config.engine.threads)}
