"""Rollout servers, started for a recipe: the command, its environment, and a process that ends with this one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import torch

from steadyrl.config import RunConfig
from steadyrl.engines import sglang_engine, vllm_engine
from steadyrl.errors import ConfigError, EngineError
from steadyrl.models.load import load_model, load_tokenizer, resolve_path, save_model

SERVERS = {"vllm": vllm_engine, "sglang": sglang_engine}
POLL_S = 0.5
STOP_S = 15.0  # for a server to end when it is asked to


@dataclass(frozen=True)
class Command:
    """What starts a server."""

    words: list[str]
    environment: dict[str, str]  # beside the variables that are there
    url: str

    def __str__(self) -> str:
        """As a line for a shell."""
        return shlex.join(["env", *(f"{name}={value}" for name, value in self.environment.items()), *self.words])


def server_command(config: RunConfig, number: int, *, python: str, model: str, options: Sequence[str] = ()) -> Command:
    """The command for server `number` of `engine.urls`, that serves the model folder or hub name `model`.

    Args:
        python: the interpreter of the environment that the server is installed in.
        options: more words for the command; where an option comes twice, the server takes the last one.

    Raises:
        ConfigError: the recipe names no such server.
    """
    urls = config.engine.urls
    if not 0 <= number < len(urls):
        raise ConfigError(
            f"there is no server {number} in engine.urls, which names {len(urls)}: set engine.kind and engine.urls, "
            "for example engine.kind=vllm engine.urls='[\"http://127.0.0.1:8000\"]'"
        )
    address = urlsplit(urls[number])
    assert address.hostname is not None
    assert address.port is not None
    server = SERVERS[config.engine.kind]
    words = server.launch_command(config, model, address.hostname, address.port, python=python)
    return Command([*words, *options], server.launch_environment(config), urls[number])


@contextmanager
def served_model(path: str) -> Iterator[str]:
    """A folder or hub name that servers can load, for a `model.path` of any form."""
    folder, gguf_file = resolve_path(path)
    if gguf_file is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="steadyrl-model-") as made:  # servers read no quantized file
        save_model(load_model(path, torch.bfloat16), load_tokenizer(path), Path(made))
        yield made


@contextmanager
def running(command: Command, deadline_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers; it is ended with the block.

    Raises:
        EngineError: it ended, or did not answer in time.
        ConfigError: there is no such program.
    """
    try:
        process = subprocess.Popen(command.words, env={**os.environ, **command.environment}, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"{command.words[0]} cannot be started ({error}): set --python") from None
    try:
        wait_until_healthy(command.url, deadline_s, process.poll)
        yield process
    finally:
        stop(process)


def wait_until_healthy(url: str, deadline_s: float, exit_code: Callable[[], int | None]) -> None:
    """Wait until GET /health answers with 200.

    Args:
        exit_code: of the server's process, None while it runs.

    Raises:
        EngineError: the process ended, or the time is over.
    """
    end = time.monotonic() + deadline_s
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if (code := exit_code()) is not None:
                raise EngineError(f"the server for {url} ended with exit code {code}: see what it printed")
            try:
                if client.get(f"{url.rstrip('/')}/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            if time.monotonic() >= end:
                raise EngineError(
                    f"the server at {url} was not healthy within {deadline_s:.0f} s: see what it printed, or raise "
                    "engine.start_timeout_s"
                )
            time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server with all its processes."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
    process.wait()
