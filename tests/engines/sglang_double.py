"""The double of `vllm_double.py`, speaking the part of SGLang's API that steadyrl uses.

Requests and answers follow SGLang 0.5.23 (`entrypoints/http_server.py`, `managers/io_struct.py`,
`managers/scheduler.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from engines.vllm_double import TINY, VllmDouble

from steadyrl.engines.contract import score
from steadyrl.models.load import load_model
from steadyrl.types import GenerationRequest, Prompt, Rollout


class SglangDouble(VllmDouble):
    """Samples, fails and dies as its base does."""

    def __init__(self, dtype: str = "float32", port: int = 0) -> None:
        super().__init__(dtype, port)
        self._server.socket.listen(256)  # each response is a connection

    def restart(self) -> None:
        super().restart()
        self.server_info: dict[str, Any] = {}  # what is told in place of the truth
        self.is_writing = False  # an update waits for what runs, and nothing begins

    # ---- routes ----

    def get(self, path: str) -> Any:
        if path == "/model_info":
            return {"model_path": TINY, "weight_version": self.weight_version, "is_generation": True}
        if path == "/server_info":
            told = {"version": "double", "dtype": self.dtype, "context_length": 512, "sampling_mask_max_tokens": 4096}
            return told | {"enable_return_routed_experts": False} | self.server_info
        assert path == "/metrics", path
        return f'# HELP\nsglang:realtime_tokens_total{{mode="decode"}} {float(self.tokens)}\n'

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        if path == "/generate":
            return self._generate(body)
        return super().post(path, query, body)

    def _control(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        if path == "/pause_generation":
            assert body["mode"] == "in_place"
            self.paused = "in_place"
        elif path == "/continue_generation":
            self.paused = None
            self.lock.notify_all()
        elif path == "/update_weights_from_disk":
            return self._update(body)
        else:
            assert path == "/abort_request", path
            assert body["rid"], "without a name, the real server would end everything"
            for name in [name for name in self.ids_of if name.startswith(body["rid"])]:
                for response in self.ids_of[name]:
                    if response not in self.finished:
                        self.finished[response] = self.engine.cancel(response)
            self.lock.notify_all()
        return {"status": "ok"}

    def _update(self, body: dict[str, Any]) -> Any:
        if self.paused is None:
            self.is_writing = True
            while self.ids_of:
                self.lock.wait()
            self.is_writing = False
        loaded = load_model(body["model_path"], getattr(torch, self.dtype))
        weights = dict((self.model if self.keeps_weights else loaded).named_parameters())
        weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.spoils(weights)
        number = self.engine.version + 1
        self.engine.load_weights(weights, number)
        self.names[number] = body["weight_version"]
        self.lock.notify_all()
        if body.get("flush_cache", True) and self.ids_of:
            return 400
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        restricted = body.get("return_sampling_mask", False)
        if restricted and not 0 < sampling["top_k"] <= 4096:
            return 400
        prompt = Prompt("double", np.asarray(body["input_ids"], np.int32), "", "")
        request = GenerationRequest(
            [prompt],
            1,
            sampling["max_new_tokens"],
            sampling["temperature"],
            next(self._seeds),
            top_p=sampling["top_p"],
            top_k=max(sampling["top_k"], 0),
            stop=tuple(sampling.get("stop", ())),
            min_response_tokens=sampling["min_new_tokens"],
        )
        with self.lock:
            self.bodies.append(body)
            engine = self.engine
            while self.paused or self.is_writing:
                self.lock.wait()
            (response,) = self.ids_of[body["rid"]] = engine.submit(request)
            while response not in self.finished:
                self.lock.wait()
                if engine is not self.engine:
                    return None  # it was restarted
            rollout = self.finished.pop(response)
            del self.ids_of[body["rid"]]
            self.lock.notify_all()
            return self._answer(body, rollout)

    def _answer(self, body: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
        tokens = rollout.token_ids[rollout.loss_mask].tolist()
        logp = rollout.behavior_logp[rollout.loss_mask].tolist()
        names = [self.names[version] for version in rollout.versions[rollout.loss_mask].tolist()]
        spans, start = [], 0
        for name, run in itertools.groupby(names):
            end = start + len(list(run))
            spans.append({"version": name, "start": start, "end": end})
            start = end
        kind = "abort" if rollout.finish == "canceled" else rollout.finish
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": kind},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.weight_version,
            "weight_versions": spans,
        }
        if body.get("return_sampling_mask"):
            assert rollout.support_ids is not None
            assert rollout.support_lengths is not None
            ends = np.cumsum(rollout.support_lengths[rollout.loss_mask])
            masks = np.split(rollout.support_ids, ends[:-1]) if tokens else []
            meta |= {
                "output_token_sampling_mask": [mask.tolist() for mask in masks],
                "output_token_sampling_logprobs": logp,
                "output_token_sampling_mask_length": len(masks),
            }
            temperature = body["sampling_params"]["temperature"]
            logp = score(self.model, [(body["input_ids"], tokens)], temperature=temperature).tempered.tolist()
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(logp, tokens, strict=True)]
        return {"text": self.tokenizer.decode(tokens), "output_ids": tokens, "meta_info": meta}
