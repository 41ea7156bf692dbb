"""A small HTTP server that speaks the part of vLLM's API that steadyrl uses, and can be told to fail.

What it samples comes from the embedded engine, so its log-probabilities are right unless a fault says otherwise.
Requests and answers follow vLLM 0.32 (`entrypoints/rl`, `entrypoints/scale_out`).
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch

from steadyrl.engines.local_engine import LocalEngine
from steadyrl.models.load import eos_token_ids, load_model, load_tokenizer
from steadyrl.types import GenerationRequest, Prompt, Rollout

TINY = "bundled:tiny_moe"
Fault = Callable[[Any, dict[str, Any]], Any]  # (answer, request) -> answer; an int is a status, None no answer ever


class VllmDouble:
    def __init__(self, dtype: str = "float32", port: int = 0) -> None:
        self.dtype = dtype
        self.asked: Counter[str] = Counter()  # requests by path
        self.bodies: list[dict[str, Any]] = []  # of requests for responses
        self.faults: dict[str, list[Fault]] = {}  # by path; each is used once
        self.always: dict[str, Fault] = {}
        self.model_config: dict[str, Any] = {}  # what is told in place of the truth
        self.keeps_weights = False  # an update changes nothing
        self.spoils: Callable[[dict[str, torch.Tensor]], None] = lambda weights: None  # what an update does to weights
        self.token_s = 0.0  # time for a token
        self._seeds = itertools.count()
        self.restart()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.double = self
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._is_alive = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True),
            threading.Thread(target=self._step, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def restart(self) -> None:
        """As a process that was started anew: with the weights it was started with."""
        model, tokenizer = load_model(TINY, getattr(torch, self.dtype)), load_tokenizer(TINY)
        self.tokenizer = tokenizer
        self.engine = LocalEngine(
            model.requires_grad_(False),
            tokenizer,
            eos_token_ids=eos_token_ids(model, tokenizer),
            max_sequences=1024,
            records_routing=False,
        )
        self.engine.version = 0
        self.model = model
        self.names = {0: "default"}  # of the engine's versions
        self.paused: str | None = None
        self.is_updating = False
        self.pending: dict[str, torch.Tensor] | None = None
        self.finished: dict[int, Rollout] = {}
        self.ids_of: dict[str, list[int]] = {}  # of running requests
        self.tokens = 0
        self.lock = threading.Condition()

    @property
    def weight_version(self) -> str:
        return self.names[self.engine.version]

    def tokens_of_running(self) -> int:
        """The most that a running response has."""
        running = self.engine._decoder.running
        return max((len(sequence.tokens) for sequence in running), default=0)

    def kill(self) -> None:
        """Die: connections break, and none is accepted."""
        self._is_alive = False
        self._server.kill()

    def _step(self) -> None:
        while self._is_alive:
            with self.lock:
                if self.paused is None and self.engine.num_running + self.engine.num_waiting:
                    self.tokens += self.engine.num_running
                    self.finished |= self.engine.step()
                    self.lock.notify_all()
                    idle = False
                else:
                    idle = True
            time.sleep(0.002 if idle else self.token_s)

    # ---- routes ----

    def get(self, path: str) -> Any:
        if path == "/server_info":
            model = {"model": TINY, "dtype": f"torch.{self.dtype}", "max_model_len": 512}
            model |= {"logprobs_mode": "processed_logprobs", "return_sampling_mask": False} | self.model_config
            return {"vllm_config": {"model_config": model}}
        if path == "/weight_info":
            return {"weight_version": self.weight_version}
        if path == "/version":
            return {"version": "double"}
        if path == "/metrics":
            return f'# HELP\nvllm:generation_tokens_total{{engine="0"}} {float(self.tokens)}\n'
        assert path == "/health", path
        return ""

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        with self.lock:
            return self._control(path, query, body)

    def _control(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        if path == "/pause":
            (mode,) = query["mode"]
            self.paused = None if mode == "wait" else mode
            while mode == "wait" and self.engine.num_running + self.engine.num_waiting:
                self.lock.wait()
            self.paused = mode
        elif path == "/resume":
            self.paused = None
        elif path == "/start_weight_update":
            if self.is_updating:
                return 500
            self.is_updating = True
        elif path == "/update_weights":
            assert self.is_updating
            loaded = load_model(body["update_info"]["folder"], getattr(torch, self.dtype))
            self.pending = dict(loaded.named_parameters())
        elif path == "/finish_weight_update":
            assert self.is_updating
            self.is_updating = False
            if "weight_version" in body:
                number = self.engine.version + 1
                weights = dict(self.model.named_parameters()) if self.keeps_weights else self.pending
                assert weights is not None
                weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
                self.spoils(weights)
                self.engine.load_weights(weights, number)
                self.names[number] = body["weight_version"]
        elif path == "/abort_requests":
            for name in body["request_ids"]:
                for response in self.ids_of.get(name.removeprefix("generate-tokens-"), []):
                    if response not in self.finished:
                        self.finished[response] = self.engine.cancel(response)
            self.lock.notify_all()
        else:
            assert path in ("/init_weight_transfer_engine", "/reset_prefix_cache"), path
        return {"status": "ok"}

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        assert "seed" not in sampling, "a seed kills vLLM on a CPU"
        prompt = Prompt("double", np.asarray(body["token_ids"], np.int32), "", "")
        request = GenerationRequest(
            [prompt],
            sampling["n"],
            sampling["max_tokens"],
            sampling["temperature"],
            next(self._seeds),
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            stop=tuple(sampling.get("stop", ())),
            min_response_tokens=sampling["min_tokens"],
        )
        with self.lock:
            self.bodies.append(body)
            if self.paused == "wait":
                return 503
            engine = self.engine
            ids = engine.submit(request)
            self.ids_of[body["request_id"]] = ids
            while not all(response in self.finished for response in ids):
                self.lock.wait()
                if engine is not self.engine:
                    return None  # it was restarted
            rollouts = [self.finished.pop(response) for response in ids]
            del self.ids_of[body["request_id"]]
            return {"request_id": body["request_id"], "choices": [self._choice(i, r) for i, r in enumerate(rollouts)]}

    def _choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        tokens = rollout.token_ids[rollout.loss_mask].tolist()
        logp = rollout.behavior_logp[rollout.loss_mask].tolist()
        versions = [self.names[version] for version in rollout.versions[rollout.loss_mask].tolist()]
        spans, start = [], 0
        for name, run in itertools.groupby(versions):
            end = start + len(list(run))
            spans.append({"version": name, "start": start, "end": end})
            start = end
        entries = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in zip(tokens, logp, strict=True)
        ]
        return {
            "index": index,
            "finish_reason": "abort" if rollout.finish == "canceled" else rollout.finish,
            "stop_reason": None,
            "token_ids": tokens,
            "logprobs": {"content": entries},
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans,
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    double: VllmDouble

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def kill(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(2)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({}, lambda double, path, query: double.get(path))

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        self._answer(body, lambda double, path, query: double.post(path, query, body))

    def _answer(self, body: dict[str, Any], act: Callable[..., Any]) -> None:
        double = self.server.double  # type: ignore[attr-defined]
        url = urlparse(self.path)
        double.asked[url.path] += 1
        waiting = double.faults.get(url.path) or []
        fault = waiting.pop(0) if waiting else double.always.get(url.path)
        answer: Any = {} if fault in (status_500, hang) else act(double, url.path, parse_qs(url.query))
        if fault is not None and not isinstance(answer, int):
            answer = fault(answer, body)
        if answer is None:
            time.sleep(60)
            return
        status = answer if isinstance(answer, int) else 200
        text = isinstance(answer, str)
        content = answer.encode() if text else json.dumps({} if isinstance(answer, int) else answer).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if text else "application/json")
        self.send_header("content-length", str(len(content)))
        with suppress(OSError):  # nobody waits any more
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def status_500(_answer: Any, _body: dict[str, Any]) -> int:
    return 500


def hang(_answer: Any, _body: dict[str, Any]) -> None:
    return None
