"""Starting rollout servers: the command for a recipe, the wait for it, and its end."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadyrl.cli import app
from steadyrl.engines.launch import Command, running, served_model, server_command
from steadyrl.errors import ConfigError, EngineError
from steadyrl.recipe import load_config

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SERVER = """
import http.server, os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.time() > START + 0.3
        self.send_response(200 if ready else 503); self.end_headers()
    def log_message(self, *_): pass
START = time.time()
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def config(*overrides: str):
    servers = ["engine.kind=vllm", 'engine.urls=["http://127.0.0.1:8001", "http://127.0.0.1:8002"]']
    return load_config(RECIPES / "tiny.toml", [*servers, *overrides])


def command_of(code: str) -> Command:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Command([sys.executable, "-c", code.replace("PORT", str(port))], {"A": "b"}, f"http://127.0.0.1:{port}")


def alive_in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_command_has_what_the_recipe_needs():
    made = server_command(config("engine.dtype=float32"), 1, python="py", model="/m", options=["--seed", "1"])
    words = made.words
    options = dict(itertools.pairwise(words))
    assert words[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8002")
    assert (options["--model"], options["--dtype"], options["--seed"]) == ("/m", "float32", "1")
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert "--enable-return-routed-experts" in words  # the recipe replays the routing
    assert "--return-sampling-mask" not in words
    assert made.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert shlex.split(str(made))[:2] == ["env", "VLLM_SERVER_DEV_MODE=1"]
    restricted = server_command(
        config("sampling.top_k=50", "model.routing_replay=false"), 0, python="py", model="/m"
    ).words
    assert "--return-sampling-mask" in restricted
    assert "--enable-return-routed-experts" not in restricted


def test_a_server_that_the_recipe_does_not_name_is_refused():
    with pytest.raises(ConfigError, match=r"no server 2 in engine\.urls, which names 2"):
        server_command(config(), 2, python="py", model="/m")


@pytest.mark.parametrize(
    "url", ["http://rollouts", "http://a:99999", "http://[::1", "http://:80", "http://a:1/x", "a:1"]
)
def test_an_address_that_is_none_is_refused_with_the_recipe(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        config(f'engine.urls=["{url}"]')


def test_a_model_folder_is_served_as_it_is():
    with served_model("bundled:tiny_moe") as folder:
        assert (Path(folder) / "config.json").is_file()


def test_a_server_is_waited_for_and_ended_with_its_children():
    begin = time.monotonic()
    with running(command_of(SERVER), 20) as process:
        assert time.monotonic() - begin >= 0.3
        assert process.poll() is None
    assert process.poll() is not None
    deadline = time.monotonic() + 5
    while alive_in_group(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_ends_or_stays_ill_is_an_error_at_once_or_at_the_deadline():
    with pytest.raises(EngineError, match="ended with exit code 3"), running(command_of("raise SystemExit(3)"), 20):
        pass
    ill = command_of(SERVER.replace("200 if ready else 503", "503"))
    with pytest.raises(EngineError, match="was not healthy within 2 s"), running(ill, 2):
        pass


def test_a_program_that_is_not_there_is_named():
    with (
        pytest.raises(ConfigError, match="/no/python cannot be started"),
        running(Command(["/no/python"], {}, "http://127.0.0.1:1"), 1),
    ):
        pass


def test_the_command_line_prints_what_a_shell_can_run():
    words = [
        sys.executable,
        *("-c", "from steadyrl.cli import main; main()", "rollout-server", str(RECIPES / "tiny.toml")),
        *("engine.kind=vllm", 'engine.urls=["http://127.0.0.1:8001"]', "--print", "--options", "--seed 1"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert shlex.split(line)[-2:] == ["--seed", "1"]
    assert '{"backend": "steadyrl-disk"}' in shlex.split(line)


def test_options_that_no_shell_could_read_are_refused():
    words = ["rollout-server", str(RECIPES / "tiny.toml"), "--print", "--options", "'unclosed"]
    with pytest.raises(ConfigError, match="No closing quotation"):
        CliRunner().invoke(app, words, catch_exceptions=False)
