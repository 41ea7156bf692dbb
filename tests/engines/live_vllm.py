"""Real vLLM servers on this machine's CPU: `make test-engines`. Each test prints what it measured.

Not collected by `make test`: it needs the environment that `make vllm` makes, 3 GB of memory for each of up to two
servers, and minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadyrl.config import RunConfig
from steadyrl.engines.base import weights_checksum
from steadyrl.engines.build import build_local_engine, build_remote_engine
from steadyrl.engines.contract import Reference, gap, score
from steadyrl.engines.http_client import JsonClient
from steadyrl.engines.launch import Command, running, served_model, server_command
from steadyrl.engines.vllm_engine import VllmDialect
from steadyrl.errors import EngineError
from steadyrl.models.load import eos_token_ids, load_model, load_tokenizer
from steadyrl.recipe import load_config
from steadyrl.run import train
from steadyrl.tasks.build import build_task
from steadyrl.types import GenerationRequest, Prompt

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TINY = "bundled:tiny_moe"
START_S = 900.0
CPU_OPTIONS = ["--enforce-eager", "--max-model-len", "256"]
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers would bind to the same core
}
STEPS = 30
LAG = 4

figures: list[Any] = []  # what lets a figure through while pytest captures what servers print


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def config_for(*urls: str, recipe: str = "tiny.toml", **overrides: Any) -> RunConfig:
    values = {"engine.kind": "vllm", "engine.urls": list(urls), "engine.max_sequences": 256}
    values |= {"engine.stall_timeout_s": 300}  # vLLM compiles on its first request, and a machine may be busy
    values |= {"model.routing_replay": False} | overrides
    return load_config(ROOT / "recipes" / recipe, [f"{key}={json.dumps(value)}" for key, value in values.items()])


class Launch:
    """Starts servers, which end with `servers`; a test may kill one before."""

    def __init__(self, servers: ExitStack) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}  # by address
        self._servers = servers
        self._model = servers.enter_context(served_model(TINY))

    def __call__(self, *options: str, **environment: str) -> str:
        """The address of a new server."""
        url = f"http://127.0.0.1:{free_port()}"
        options = (*CPU_OPTIONS, *options)
        command = server_command(config_for(url), 0, python=str(PYTHON), model=self._model, options=options)
        command = Command(command.words, {**command.environment, **CPU_ENVIRONMENT, **environment}, url)
        begin = time.monotonic()
        self.processes[url] = self._servers.enter_context(running(command, START_S))
        say(f"server ready in {time.monotonic() - begin:.0f} s")
        return url


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    with ExitStack() as servers:
        yield Launch(servers)


@pytest.fixture(scope="module")
def server(launch) -> str:
    return launch()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    config = config_for("http://127.0.0.1:1")
    task = build_task(config.task, load_tokenizer(TINY), seed=0)
    return task.prompts("train", 0, 32)


@pytest.fixture(scope="module", autouse=True)
def shows_figures(request) -> None:
    figures.append(request.config.pluginmanager.getplugin("capturemanager"))


def say(text: str) -> None:
    """Show a figure whether the test fails or not, without all that the servers print."""
    with figures[0].global_and_fixture_disabled():
        print(f"\n[live] {text}", flush=True)


def moved(scale: float) -> dict[str, torch.Tensor]:
    """Weights of the bundled model in bfloat16, moved by `scale` times their own spread."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (p.detach() + scale * p.std() * torch.randn(p.shape, generator=generator)).bfloat16()
        for name, p in load_model(TINY, torch.float32).named_parameters()
    }


def request(prompts: Sequence[Prompt], samples: int, tokens: int = 32, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(list(prompts), samples, tokens, **{"temperature": 1.0, "seed": 0, **sampling})


def test_three_broadcasts_under_load_arrive(server, prompts):
    engine = build_remote_engine(config_for(server), prompts[:4])
    try:
        begin = time.monotonic()
        engine.load_weights(moved(0.0), 0)
        say(f"contract and first weights: {time.monotonic() - begin:.2f} s")
        ids, arrived = [], {}
        for version in (1, 2, 3):
            ids += engine.submit(request(prompts, samples=8, min_response_tokens=16))
            time.sleep(0.2)
            sent = moved(0.01 * version)
            begin = time.monotonic()
            assert engine.load_weights(sent, version) == weights_checksum(sent)
            say(f"weights {version} under load, verified: {time.monotonic() - begin:.2f} s")
        while len(arrived) < len(ids):
            arrived |= engine.step()
        spans = [sorted(set(rollout.versions[rollout.loss_mask].tolist())) for rollout in arrived.values()]
        say(f"{len(ids)} responses; {sum(len(span) > 1 for span in spans)} go over a broadcast")
        assert any(len(span) > 1 for span in spans)
        assert all(rollout.is_trainable for rollout in arrived.values())

        mirror = load_model(TINY, torch.bfloat16)
        mirror.load_state_dict(moved(0.03))
        fresh = engine.generate(request(prompts, samples=4))
        begin = time.monotonic()
        tokens = sum(rollout.num_sampled for rollout in engine.generate(request(prompts, samples=8)))
        say(f"{tokens / (time.monotonic() - begin):.0f} tokens/s")
        sequences = [(r.token_ids[~r.loss_mask].tolist(), r.token_ids[r.loss_mask].tolist()) for r in fresh]
        reported = np.concatenate([r.behavior_logp[r.loss_mask] for r in fresh]).astype(np.float64)
        found = gap(reported, score(mirror, sequences, temperature=1.0).processed)
        say(f"mean |difference| of {len(reported)} log-probabilities after three updates: {found:.4f}")
        assert found < 0.02
        assert {version for r in fresh for version in r.versions[r.loss_mask].tolist()} == {3}
    finally:
        engine.close()


def test_a_canceled_response_keeps_its_tokens(server, prompts):
    engine = build_remote_engine(config_for(server), prompts[:4])
    try:
        engine.load_weights(moved(0.0), 0)
        # many, so that the server needs seconds for them: a few would be finished before they could be canceled
        ids = engine.submit(request(prompts, samples=8, tokens=200, min_response_tokens=199))
        time.sleep(0.5)
        rollouts = [engine.cancel(response) for response in ids]
        lengths = [rollout.num_sampled for rollout in rollouts if rollout.finish == "canceled"]
        say(f"{len(lengths)} of {len(ids)} responses canceled, after {min(lengths)} to {max(lengths)} tokens")
        assert len(lengths) >= len(ids) / 2
        assert max(lengths) < 200  # one that has all its tokens was not canceled
        assert any(0 < length < 150 for length in lengths)
    finally:
        engine.close()


def test_a_run_agrees_with_one_of_the_embedded_engine(server, tmp_path):
    """d-bar over an asynchronous run is that of the embedded engine, within its spread over the steps."""
    sizes: dict[str, Any] = {
        "trainer.steps": STEPS,
        "pipeline.lag": LAG,
        "pipeline.prompts_per_batch": 16,
        "evaluation.every_steps": 0,
        "evaluation.prompts": 16,
        "evaluation.samples_per_prompt": 2,
    }
    drift, ends, seconds = {}, {}, {}
    for name in ("vllm", "local"):
        config = config_for(server, run_dir=str(tmp_path / name), **sizes)
        if name == "local":
            local = config.engine.model_copy(update={"kind": "local", "urls": ()})
            config = config.model_copy(update={"engine": local})
        begin = time.monotonic()
        assert train(config).finished
        seconds[name] = time.monotonic() - begin
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert len(rows) == STEPS
        drift[name] = np.array([row["metrics"]["mismatch/d_bar"] for row in rows])
        ends[name] = rows[-1]["metrics"]["counts/dropped"]
    spread = float(drift["local"].std())
    say(
        f"d-bar over {STEPS} steps at lag {LAG}: vLLM {drift['vllm'].mean():.4f}, embedded {drift['local'].mean():.4f} "
        f"(spread over its steps {spread:.4f}); {seconds['vllm']:.0f} s and {seconds['local']:.0f} s"
    )
    assert abs(drift["vllm"].mean() - drift["local"].mean()) <= spread
    assert ends == {"vllm": 0.0, "local": 0.0}


def test_a_killed_server_is_survived(server, launch, prompts):
    other = launch()
    engine = build_remote_engine(config_for(server, other), prompts[:4])
    try:
        engine.load_weights(moved(0.0), 0)
        ids = engine.submit(request(prompts, samples=8, min_response_tokens=30))
        time.sleep(0.3)
        os.killpg(launch.processes[other].pid, 9)
        begin, arrived = time.monotonic(), {}
        while len(arrived) < len(ids):
            arrived |= engine.step()
        say(f"{len(arrived)} responses {time.monotonic() - begin:.1f} s after one of two servers was killed")
        assert all(rollout.is_trainable for rollout in arrived.values())
        engine.load_weights(moved(0.01), 1)
        assert all(rollout.version == 1 for rollout in engine.generate(request(prompts[:4], samples=2)))
    finally:
        engine.close()


def test_without_the_plugins_repair_the_corruption_is_caught(launch, prompts):
    url = launch(STEADYRL_VLLM_REPACK="0")
    engine = build_remote_engine(config_for(url), prompts[:4])
    try:
        with pytest.raises(EngineError, match="log-probabilities differ") as caught:
            engine.load_weights(moved(0.0), 0)
        say(str(caught.value))
    finally:
        engine.close()
        os.killpg(launch.processes[url].pid, 9)


def test_what_an_unchanged_policy_shows(server, launch, prompts):
    """The table of docs/engines.md: ratios exp(trainer - engine) with the same weights on both sides."""
    sampling: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9}
    engine = build_remote_engine(config_for(server), prompts[:4])
    engine.load_weights(moved(0.0), 0)  # what the others have from the start
    engine.close()
    raw = launch("--logprobs-mode", "raw_logprobs")
    mirror, tokenizer = load_model(TINY, torch.bfloat16), load_tokenizer(TINY)
    dialect = VllmDialect(sorted(eos_token_ids(mirror, tokenizer)))
    rows: dict[str, tuple[np.ndarray, Reference]] = {}
    for name, url in (("vLLM default (raw_logprobs)", raw), ("vLLM processed_logprobs", server)):
        rows[name] = sampled(dialect, url, mirror, request(prompts, samples=8, **sampling))
    embedded = build_local_engine(TINY, "bfloat16", 256, records_routing=False)
    embedded.load_weights({name: p.detach() for name, p in mirror.named_parameters()}, 0)
    rollouts = embedded.generate(request(prompts, samples=8, **sampling))
    sequences = [(r.token_ids[~r.loss_mask].tolist(), r.token_ids[r.loss_mask].tolist()) for r in rollouts]
    reported = np.concatenate([r.behavior_logp[r.loss_mask] for r in rollouts]).astype(np.float64)
    rows["embedded engine"] = (reported, score(mirror, sequences, **sampling))
    exact = rows["embedded engine"][1]
    rows["reported after the temperature, before top-p"] = (exact.tempered, exact)
    for name, (logp, reference) in rows.items():
        for trainer, expected in (("all tokens", reference.tempered), ("support", reference.processed)):
            ratio = np.exp(expected - logp)
            low, high = np.quantile(ratio, [0.01, 0.99])
            say(
                f"{name} | trainer over {trainer}: mean ratio {ratio.mean():.3f}, 1% {low:.3f}, 99% {high:.3f}, "
                f"mean |log ratio| {np.abs(expected - logp).mean():.4f}, {len(logp)} tokens"
            )
    assert gap(rows["vLLM processed_logprobs"][0], rows["vLLM processed_logprobs"][1].processed) < 0.02
    assert gap(rows["embedded engine"][0], exact.processed) < 0.02
    assert gap(rows["vLLM default (raw_logprobs)"][0], rows["vLLM default (raw_logprobs)"][1].raw) < 0.02


def sampled(dialect: VllmDialect, url: str, mirror: Any, wanted: GenerationRequest) -> tuple[np.ndarray, Reference]:
    """What a server with the weights it was started with reports for what it samples, and what the mirror says."""

    async def ask() -> list[Any]:
        client = JsonClient(url)
        await dialect.resume(client)
        answers = [
            await dialect.generate(
                client, f"live-{i}", prompt, wanted, weights="live", routed_experts=False, timeout_s=120
            )
            for i, prompt in enumerate(wanted.prompts)
        ]
        await client.close()
        return answers

    answers = asyncio.run(ask())
    sequences = [(p.token_ids.tolist(), c.token_ids) for p, a in zip(wanted.prompts, answers, strict=True) for c in a]
    reported = np.array([logp for answer in answers for completion in answer for logp in completion.logp])
    return reported, score(mirror, sequences, temperature=wanted.temperature, top_p=wanted.top_p)
