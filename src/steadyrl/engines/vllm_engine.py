"""vLLM: its routes for token-in, token-out generation and for weights, as of 0.32 and 0.33.

    GET  /server_info, /weight_info, /version     POST /pause, /resume, /reset_prefix_cache
    GET  /health, /metrics                        POST /init_weight_transfer_engine
    POST /inference/v1/generate, /abort_requests  POST /start_weight_update, /update_weights, /finish_weight_update
    POST /tokenize

The server needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out for these, --logprobs-mode processed_logprobs to report
what it samples from, and --weight-transfer-config with the backend of `vllm_plugin.py`; `launch_command` has it all.

No request carries a seed: on a CPU, vLLM 0.32 dies of one ("CPU Generator does not use offset").
"""

from __future__ import annotations

import base64
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steadyrl.config import RunConfig
from steadyrl.engines.common_routes import counter, tokenize, version_spans
from steadyrl.engines.dialect import (
    Completion,
    HttpClient,
    LogprobsMode,
    Pause,
    ServerFault,
    ServerInfo,
)
from steadyrl.types import GenerationRequest, Prompt

INFO_S = 60.0  # the first answer of a server about itself takes seconds: it looks at its whole environment
SHORT_S = 20.0
NO_LOGP = -9999.0  # what vLLM writes for NaN, for -inf, and where it has no log-probability at all
SPARE = 16  # responses beyond those of the run: weights are verified while all others are running
TOKEN_COUNT = "vllm:generation_tokens_total"
FINISH: dict[str, Literal["stop", "length", "canceled"]] = {"stop": "stop", "length": "length", "abort": "canceled"}
MODES: dict[str, LogprobsMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


class VllmDialect:
    """A `Dialect`.

    Args:
        eos_token_ids: each of them ends a response.
    """

    name = "vllm"

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)

    async def info(self, client: HttpClient) -> ServerInfo:
        """See `dialect.Dialect`."""
        answer = await client.get("/server_info?config_format=json", timeout_s=INFO_S)
        config = answer.get("vllm_config")
        if not isinstance(config, dict) or not isinstance(model := config.get("model_config"), dict):
            raise ServerFault("GET /server_info: there is no vllm_config in the answer")
        version = await client.get("/weight_info", timeout_s=SHORT_S)
        release = await client.get("/version", timeout_s=SHORT_S)
        auxiliary = config.get("aux_output_config") or {}
        return ServerInfo(
            software=f"vllm {release.get('version')}",
            model=str(model.get("model")),
            weight_version=str(version.get("weight_version")),
            context_length=model.get("max_model_len"),
            logprobs=MODES.get(str(model.get("logprobs_mode"))),
            dtype=str(model.get("dtype")).removeprefix("torch."),
            returns_routed_experts=bool(auxiliary.get("enable_return_routed_experts")),
            returns_support=bool(model.get("return_sampling_mask")),
        )

    async def progress(self, client: HttpClient, *, timeout_s: float) -> float | None:
        """See `dialect.Dialect`."""
        await client.get("/health", timeout_s=timeout_s)
        return await counter(client, TOKEN_COUNT, timeout_s=timeout_s)

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
        """See `dialect.Dialect`."""
        body = {
            "request_id": request_id,
            "token_ids": prompt.token_ids.tolist(),
            "sampling_params": self._sampling(request),
            # a prompt that was read by other weights, and is kept for running responses, is not read from there
            "cache_salt": weights,
        }
        answer = await client.post("/inference/v1/generate", body, timeout_s=timeout_s)
        choices = answer.get("choices")
        if not isinstance(choices, list):
            raise ServerFault("POST /inference/v1/generate: there are no choices in the answer")
        try:
            choices = sorted(choices, key=lambda choice: choice["index"])
            return [_completion(choice, wants_experts=routed_experts) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"POST /inference/v1/generate: the answer cannot be read: {error!r}") from None

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """See `dialect.Dialect`."""
        # the server puts a prefix before the names of these requests
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await client.post("/abort_requests", body, timeout_s=SHORT_S)

    async def pause(self, client: HttpClient, mode: Pause, *, timeout_s: float) -> None:
        """See `dialect.Dialect`."""
        await client.post(f"/pause?mode={mode}", timeout_s=timeout_s)

    async def load(self, client: HttpClient, folder: Path, version: str, *, timeout_s: float) -> None:
        """See `dialect.Dialect`. Prefixes in use by running responses stay cached; no later request asks for them."""
        await client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=SHORT_S)
        try:
            await client.post("/start_weight_update", timeout_s=timeout_s)
        except ServerFault:  # an update was begun and never finished
            await client.post("/finish_weight_update", {}, timeout_s=timeout_s)
            await client.post("/start_weight_update", timeout_s=timeout_s)
        await client.post("/update_weights", {"update_info": {"folder": str(folder)}}, timeout_s=timeout_s)
        await client.post("/reset_prefix_cache", timeout_s=timeout_s)
        await client.post("/finish_weight_update", {"weight_version": version}, timeout_s=timeout_s)

    async def resume(self, client: HttpClient) -> None:
        """See `dialect.Dialect`."""
        await client.post("/resume", timeout_s=SHORT_S)

    async def tokenize(self, client: HttpClient, text: str, *, timeout_s: float) -> list[int] | None:
        """See `dialect.Dialect`."""
        return await tokenize(client, text, timeout_s=timeout_s)

    def _sampling(self, request: GenerationRequest) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "n": request.samples_per_prompt,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "max_tokens": request.max_response_tokens,
            "min_tokens": request.min_response_tokens,
            "stop_token_ids": self._eos_token_ids,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(request.stop),
        }
        return sampling | ({"stop": list(request.stop)} if request.stop else {})


def _completion(choice: dict[str, Any], *, wants_experts: bool) -> Completion:
    finish = FINISH.get(choice["finish_reason"])
    if finish is None:
        raise ValueError(f"finish reason {choice['finish_reason']!r}")
    content = (choice["logprobs"] or {}).get("content") or []
    experts = choice.get("routed_experts") if wants_experts else None
    return Completion(
        token_ids=[int(token) for token in choice["token_ids"] or []],
        logp=[_logp(entry) for entry in content],
        finish=finish,
        spans=version_spans(choice["weight_versions"]),
        routed_experts=None if experts is None else _array(experts),
        support=choice.get("sampling_mask"),
    )


def _logp(entry: dict[str, Any]) -> float:
    logp = entry.get("logprob")
    return math.nan if logp is None or logp == NO_LOGP else float(logp)


def _array(text: str) -> NDArray[Any]:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def launch_command(config: RunConfig, model: str, host: str, port: int, *, python: str = sys.executable) -> list[str]:
    """The command that serves the model at `model` the way a run with this configuration needs it.

    Its environment is `launch_environment`. `vllm serve` takes the same options.
    """
    engine = config.engine
    options = {
        "--model": model,
        "--host": host,
        "--port": str(port),
        "--dtype": engine.dtype,
        "--max-num-seqs": str(engine.max_sequences + SPARE),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--weight-transfer-config": json.dumps({"backend": "steadyrl-disk"}),
    }
    flags = ["--enable-scale-out"]
    if config.model.routing_replay:
        flags.append("--enable-return-routed-experts")
    if config.sampling.is_restricted:
        flags.append("--return-sampling-mask")
    words = [word for option in options.items() for word in option]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


def launch_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that the server needs beside those that are there."""
    return {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": str(config.engine.threads)}
