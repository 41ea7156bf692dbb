"""Whole runs on doubles of rollout servers: the books balance, and faults are counted or end the run."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_double import VllmDouble, status_500

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError, EngineError
from steadyrl.recipe import load_config
from steadyrl.run import train
from steadyrl.tasks.build import build_task

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "smoke.toml"
GENERATE = "/inference/v1/generate"


@pytest.fixture
def double() -> Iterator[VllmDouble]:
    made = VllmDouble()
    yield made
    made.kill()


def config_for(folder: Path, *urls: str, **overrides: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run_dir": str(folder),
        "engine.kind": "vllm",
        "engine.urls": list(urls),
        "engine.dtype": "float32",
        "engine.probe_tolerance": 0.001,
        "model.routing_replay": False,
        "trainer.steps": 4,
        "trainer.lr": 3e-4,
        "pipeline.backend": "process",
        "pipeline.lag": 2,
        "pipeline.prompts_per_batch": 4,
        "pipeline.responses_per_prompt": 4,
        "evaluation.prompts": 4,
        "evaluation.every_steps": 0,
    }
    values |= overrides
    return load_config(RECIPE, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_books(rows: list[dict[str, float]]) -> None:
    for row in rows:
        count = {name: row[f"counts/{name}"] for name in ("generated", "trained", "dropped", "buffered")}
        assert count["generated"] == count["trained"] + count["dropped"] + count["buffered"]


def test_a_batch_wise_run_with_the_weights_of_the_schedule(double, tmp_path):
    assert train(config_for(tmp_path / "run", double.url)).finished
    rows = metrics(tmp_path / "run")
    assert len(rows) == 4
    check_books(rows)
    assert rows[-1]["counts/dropped"] == 0
    assert rows[0]["mismatch/d_bar"] < 1e-4  # the same weights on both sides
    assert rows[3]["mismatch/d_bar"] > 1e-4  # and then not
    assert double.asked["/finish_weight_update"] < 4 + 1  # not one for every step


def test_a_streaming_run_with_weights_that_arrive_in_flight(double, tmp_path):
    double.token_s = 0.002
    streaming = {"pipeline.regime": "streaming", "pipeline.lag": 1, "pipeline.max_lag": 3, "trainer.steps": 6}
    assert train(config_for(tmp_path / "run", double.url, **streaming)).finished
    rows = metrics(tmp_path / "run")
    check_books(rows)
    assert rows[-1]["counts/trained"] == 6 * 16


def test_a_group_without_an_answer_is_dropped_and_counted(double, tmp_path, tokenizer):
    config = config_for(tmp_path / "run", double.url)
    third = build_task(config.task, tokenizer, config.seed).prompts("train", 2, 1)[0].token_ids.tolist()

    def nan_for_one_prompt(answer, body):  # but not where it shows that the server is the right one
        if body["token_ids"] == third and "probe" not in body["request_id"]:
            for choice in answer["choices"]:
                choice["logprobs"]["content"][0]["logprob"] = math.nan
        return answer

    double.always[GENERATE] = nan_for_one_prompt
    assert train(config).finished
    rows = metrics(tmp_path / "run")
    check_books(rows)
    assert [row["counts/dropped"] for row in rows] == [4, 4, 4, 4]
    assert rows[-1]["engine/retries"] == rows[-1]["engine/outages"] - 1 == 2


def test_a_run_without_servers_ends_with_the_cause_and_keeps_what_it_has(double, tmp_path):
    config = config_for(tmp_path / "run", double.url, **{"engine.recovery_timeout_s": 1, "trainer.steps": 500})
    killer = threading.Timer(0.0, lambda: None)

    def kill_soon(answer, _body):
        nonlocal killer
        if (tmp_path / "run" / "metrics.jsonl").exists() and killer.interval == 0.0:
            killer = threading.Timer(0.2, double.kill)
            killer.start()
        return answer

    double.always[GENERATE] = kill_soon
    with pytest.raises(EngineError, match=r"no rollout server (was ready|took over)"):
        train(config)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert any((tmp_path / "run" / "checkpoints").iterdir())


def test_what_does_not_fit_ends_before_the_first_step(double, tmp_path):
    double.always["/update_weights"] = status_500
    with pytest.raises(EngineError, match="no rollout server took over"):
        train(config_for(tmp_path / "run", double.url))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"engine.urls": []}, "needs servers: set engine.urls"),
        ({"engine.kind": "local"}, r"engine\.urls names servers"),
        ({"engine.urls": ["http://a:1/v1"]}, r"engine\.urls has http://a:1/v1"),
        ({"engine.cache_on_update": "rebuild"}, "is for the embedded engine"),
        ({"pipeline.backend": "inline"}, "beside the trainer"),
        ({"sampling.top_p": 0.9}, "only together with top-k"),
        ({"objective": "dppo-topk-tv"}, "which servers do not return"),
    ],
)
def test_what_servers_cannot_do_is_refused(tmp_path, overrides, why):
    with pytest.raises(ConfigError, match=why):
        config_for(tmp_path, "http://127.0.0.1:8000", **overrides)
