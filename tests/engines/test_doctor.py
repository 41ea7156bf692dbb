"""What `steadyrl doctor` says about this machine, and about doubles of servers that agree or differ."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from engines.sglang_double import SglangDouble
from engines.vllm_double import VllmDouble
from rich.console import Console
from typer.testing import CliRunner

from steadyrl.cli import app
from steadyrl.engines.doctor import check_installation, check_server
from steadyrl.errors import ConfigError, EngineError
from steadyrl.recipe import load_config

TINY = Path(__file__).parent.parent.parent / "recipes" / "tiny.toml"


@pytest.fixture(params=[VllmDouble, SglangDouble])
def server(request) -> Iterator[VllmDouble]:
    made = request.param()
    yield made
    made.kill()


def examine(server: VllmDouble, *overrides: str) -> str:
    kind = "sglang" if isinstance(server, SglangDouble) else "vllm"
    given = [f"engine.kind={kind}", f'engine.urls=["{server.url}"]', "engine.dtype=float32"]
    config = load_config(TINY, [*given, "model.routing_replay=false", *overrides])
    page = io.StringIO()
    try:
        check_server(config, Console(file=page, width=200))
    except EngineError as error:
        return f"{page.getvalue()}\n{error}"
    return page.getvalue()


def number(page: str, name: str) -> float:
    return float(re.findall(rf"{name} +│ +([\d.]+)", page)[0])


def test_a_server_that_agrees_is_told_by_how_much_and_keeps_its_weights(server):
    page = examine(server, "sampling.temperature=0.6")
    assert "is not what the recipe needs" not in page
    assert number(page, "from the sampled distribution") < 1e-4
    assert number(page, "from that without temperature") > 0.01
    assert server.weight_version == "default"
    assert server.paused is None


def test_a_server_with_other_weights_or_another_dtype_is_named_with_the_difference(server):
    weights = {name: p.detach() + 0.1 * p.std() * torch.randn_like(p) for name, p in server.model.named_parameters()}
    server.engine.load_weights(weights, 1)
    server.names[1] = "another"
    page = examine(server, "engine.dtype=bfloat16")
    assert "differ from those of the trainer's weights by" in page
    assert "set engine.dtype=float32" in page
    assert number(page, "from the sampled distribution") > 0.05


def test_another_tokenizer_is_named(server):
    server.always["/tokenize"] = lambda answer, body: {"tokens": [5, *answer["tokens"]]}
    page = examine(server)
    assert "its tokenizer makes [5, " in page
    assert "differs" in page


def test_a_server_that_is_not_there_ends_with_the_cause(server):
    server.kill()
    assert "is not what the recipe needs: GET /" in examine(server)


def test_another_kind_of_server_is_told_by_its_pages():
    pages = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    console = Console(file=io.StringIO(), width=400)
    overrides = [
        "pipeline.backend=process",
        "engine.kind=vllm",
        f'engine.urls=["http://127.0.0.1:{pages.server_port}"]',
    ]
    try:
        with pytest.raises(EngineError, match="a web page, so it is no rollout server"):
            check_server(load_config(TINY, overrides), console)
    finally:
        pages.shutdown()


def test_what_is_installed_has_versions_and_remedies(monkeypatch):
    from importlib import metadata

    real = metadata.version

    def without_matplotlib(name: str) -> str:
        if name == "matplotlib":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_matplotlib)
    page = io.StringIO()
    check_installation(Console(file=page, width=400))
    assert re.search(rf"torch +│ {re.escape(torch.__version__)}", page.getvalue())
    assert 'without matplotlib: pip install "steadyrl[report]"' in page.getvalue()
    assert f"jinja2 {real('jinja2')}" in page.getvalue()


def test_a_check_without_a_recipe_or_with_an_unknown_kind_is_refused():
    run = CliRunner()
    error = run.invoke(app, ["doctor", "--engine", "http://127.0.0.1:1"]).exception
    assert isinstance(error, ConfigError)
    assert "needs the recipe" in str(error)
    error = run.invoke(app, ["doctor", str(TINY), "--engine", "http://127.0.0.1:1", "--kind", "tgi"]).exception
    assert isinstance(error, ConfigError)
    assert "engine.kind" in str(error)
