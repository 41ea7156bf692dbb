"""What goes to an SGLang server and what comes back, without one."""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.test_vllm_engine import PROMPT, Script, request

from steadyrl.engines.build import moe_layers
from steadyrl.engines.dialect import ServerFault, VersionSpan
from steadyrl.engines.launch import server_command
from steadyrl.engines.sglang_engine import MoeLayers, SglangDialect
from steadyrl.recipe import load_config

RECIPES = Path(__file__).parent.parent.parent / "recipes"


def answer(kind: str = "stop", **more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": kind},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
    }
    return {"text": "", "output_ids": [7, 2], "meta_info": meta | more}


def ask(answers: list[dict[str, Any]], *, moe: MoeLayers | None = None, **sampling):
    client = Script({"/generate": answers})
    made = SglangDialect([2, 1], moe).generate(
        client, "r1", PROMPT, request(**sampling), weights="a", routed_experts=moe is not None, timeout_s=1
    )
    return asyncio.run(made), [body for _, body in client.asked]


def test_each_response_is_a_request_that_names_everything_and_carries_no_seed():
    _, bodies = ask([answer(), answer()], stop=("\n",), min_response_tokens=3)
    assert [body["rid"] for body in bodies] == ["r1-0.", "r1-1."]
    assert bodies[0] == {
        "rid": "r1-0.",
        "input_ids": [4, 5, 6],
        "sampling_params": {
            "temperature": 0.6,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 9,
            "min_new_tokens": 3,
            "stop_token_ids": [1, 2],
            "no_stop_trim": True,
            "stop": ["\n"],
        },
        "return_logprob": True,
        "return_routed_experts": False,
        "extra_key": "a",
    }


def test_completions_have_tokens_logprobs_and_versions():
    (first, second), _ = ask([answer("length"), answer("abort", output_token_logprobs=[[None, 7], [-1e38, 2]])])
    assert (first.finish, second.finish) == ("length", "canceled")
    assert first.token_ids == [7, 2]
    assert first.logp == [-0.5, -0.25]
    assert first.spans == [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)]
    assert first.support is None
    assert all(math.isnan(logp) for logp in second.logp)


def test_a_restricted_draw_asks_for_the_mask_and_takes_the_logprobs_that_come_with_it():
    masked = answer(output_token_sampling_mask=[[7, 8], [2]], output_token_sampling_logprobs=[-0.1, 0.0])
    (first, _), bodies = ask([masked, masked], top_p=0.9, top_k=20)
    assert (bodies[0]["return_sampling_mask"], bodies[0]["sampling_logprobs_mode"]) == (True, "selected")
    assert (bodies[0]["sampling_params"]["top_k"], bodies[0]["return_logprob"]) == (20, False)
    assert first.logp == [-0.1, 0.0]
    assert first.support == [[7, 8], [2]]


def test_routed_experts_are_those_of_the_layers_that_have_some():
    everything = np.arange(4 * 5 * 2, dtype=np.int32).reshape(4, 5, 2)  # 3 + 2 - 1 tokens, 5 layers, 2 experts
    text = base64.b64encode(everything.tobytes()).decode()
    (first, _), bodies = ask([answer(routed_experts=text)] * 2, moe=MoeLayers((1, 3), 2))
    assert bodies[0]["return_routed_experts"] is True
    np.testing.assert_array_equal(first.routed_experts, everything[:, [1, 3]])
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.uint8
    (first, _), _ = ask(
        [answer(routed_experts=base64.b64encode((everything * 100).tobytes()).decode())] * 2, moe=MoeLayers((1, 3), 2)
    )
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.uint16
    for broken in (text[:-8], base64.b64encode((-everything).tobytes()).decode()):
        with pytest.raises(ServerFault, match="cannot be read"):
            ask([answer(routed_experts=broken)] * 2, moe=MoeLayers((1, 3), 2))


def test_the_layers_of_the_bundled_model_that_have_experts(model):
    found = moe_layers(model)
    config = model.config
    assert found == MoeLayers(tuple(range(config.num_hidden_layers)), config.num_experts_per_tok)


def test_an_abort_names_every_response_of_a_running_request_and_of_no_other():
    class Slow(Script):
        async def post(self, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
            given = await super().post(path, body, timeout_s=timeout_s)
            if path == "/generate":
                await asyncio.sleep(0.05)
            return given

    async def cancel() -> list[str]:
        client, dialect = Slow({"/generate": [answer()] * 4}), SglangDialect([2])
        running = [
            asyncio.create_task(
                dialect.generate(client, name, PROMPT, request(), weights="a", routed_experts=False, timeout_s=1)
            )
            for name in ("r1", "r11")
        ]
        await asyncio.sleep(0.01)
        await dialect.abort(client, "r1")
        await asyncio.gather(*running)
        await dialect.abort(client, "r1")  # it has ended: there is nothing to abort
        return [body["rid"] for path, body in client.asked if path == "/abort_request"]

    assert asyncio.run(cancel()) == ["r1-0.", "r1-1."]


def test_one_failed_response_ends_the_others():
    with pytest.raises(ServerFault, match="gone"):
        ask([ServerFault("gone"), answer()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"meta_info": 3}, "cannot be read"),
        ({"text": "no json"}, "cannot be read"),
        (answer("lost"), "finish reason"),
        (answer(output_token_logprobs=[[-0.5, 8], [-0.25, 2]]), "log-probabilities of other tokens"),
        (answer(weight_versions=None), "SGLang 0.5.23 or newer"),
        (answer(weight_versions=[{"version": "a"}]), "cannot be read"),
        ({**answer(), "output_ids": ["x", "y"]}, "cannot be read"),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_fault(broken, why):
    with pytest.raises(ServerFault, match=why):
        ask([answer(), broken])


def test_missing_logprobs_are_left_to_the_check_of_completions():
    (first, _), _ = ask([answer(output_token_logprobs=None)] * 2)
    assert (first.token_ids, first.logp) == ([7, 2], [])


@pytest.mark.parametrize(("mode", "paths"), [("keep", ["/pause_generation"]), ("wait", [])])
def test_weights_are_loaded_in_place_without_a_flush(mode, paths):
    client = Script({"/update_weights_from_disk": {"success": True}})

    async def update() -> None:
        dialect = SglangDialect([2])
        await dialect.pause(client, mode, timeout_s=1)
        await dialect.load(client, Path("/w/7"), "run.7", timeout_s=1)
        await dialect.resume(client)

    asyncio.run(update())
    assert [path for path, _ in client.asked] == [*paths, "/update_weights_from_disk", "/continue_generation"]
    assert client.asked[-2][1] == {"model_path": "/w/7", "weight_version": "run.7", "flush_cache": False}


def test_progress_counts_tokens_where_the_server_does():
    text = 'sglang:realtime_tokens_total{mode="decode"} 5.0\nsglang:realtime_tokens_total{mode="prefill_compute"} 7.0\n'
    dialect = SglangDialect([2])
    assert asyncio.run(dialect.progress(Script({"/metrics": {"text": text}}), timeout_s=1)) == 12.0
    assert asyncio.run(dialect.progress(Script({"/metrics": ServerFault("404")}), timeout_s=1)) is None
    with pytest.raises(ServerFault):
        asyncio.run(dialect.progress(Script({"/model_info": ServerFault("503")}), timeout_s=1))


def test_the_command_has_what_the_recipe_needs():
    servers = ["engine.kind=sglang", 'engine.urls=["http://127.0.0.1:8001"]', "engine.dtype=float32"]
    config = load_config(RECIPES / "tiny.toml", [*servers, "sampling.top_p=0.9", "sampling.top_k=3000"])
    made = server_command(config, 0, python="py", model="/m", options=["--tp", "2"])
    options = dict(itertools.pairwise(made.words))
    assert made.words[:3] == ["py", "-m", "sglang.launch_server"]
    assert (options["--model-path"], options["--port"], options["--dtype"]) == ("/m", "8001", "float32")
    assert (options["--sampling-mask-max-tokens"], options["--tp"]) == ("6000", "2")
    assert {"--enable-metrics", "--enable-return-routed-experts"} <= set(made.words)
    assert made.environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
