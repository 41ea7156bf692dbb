"""What goes to a vLLM server and what comes back, without one."""

from __future__ import annotations

import asyncio
import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from steadyrl.engines.dialect import ServerFault, VersionSpan
from steadyrl.engines.vllm_engine import VllmDialect
from steadyrl.engines.vllm_plugin import read_weights
from steadyrl.types import GenerationRequest, Prompt

PROMPT = Prompt("p", np.array([4, 5, 6], np.int32), "", "")


class Script:
    """An `HttpClient` that answers as it is told, and remembers what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        return await self.post(path, None, timeout_s=timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        self.asked.append((path, body))
        answer = self.answers.get(path.partition("?")[0], {})
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def entry(token: int, logp: float | None) -> dict[str, Any]:
    return {"token_id": token, "logprob": logp, "rank": 1, "top_logprobs": []}


def choice(index: int, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": "stop",
        "token_ids": [7, 2],
        "logprobs": {"content": [entry(7, -0.5), entry(2, -0.25)]},
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
        **more,
    }


def ask(client: Script, request: GenerationRequest, *, routed_experts: bool = False):
    dialect = VllmDialect([2, 1])
    return asyncio.run(
        dialect.generate(client, "r1", PROMPT, request, weights="a", routed_experts=routed_experts, timeout_s=1)
    )


def request(**more: Any) -> GenerationRequest:
    return GenerationRequest([PROMPT], 2, 9, 0.6, seed=7, **more)


def test_a_request_names_everything_and_carries_no_seed():
    client = Script({"/inference/v1/generate": {"choices": [choice(0), choice(1)]}})
    ask(client, request(top_p=0.9, top_k=20, stop=("\n",), min_response_tokens=3))
    ((path, body),) = client.asked
    assert path == "/inference/v1/generate"
    assert body["request_id"] == "r1"
    assert body["token_ids"] == [4, 5, 6]
    assert body["cache_salt"] == "a"
    assert body["sampling_params"] == {
        "n": 2,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop_token_ids": [1, 2],
        "logprobs": 0,
        "detokenize": True,
        "stop": ["\n"],
    }


def test_completions_come_in_order_with_tokens_logprobs_and_versions():
    client = Script({"/inference/v1/generate": {"choices": [choice(1, finish_reason="abort"), choice(0)]}})
    first, second = ask(client, request())
    assert (first.finish, second.finish) == ("stop", "canceled")
    assert first.token_ids == [7, 2]
    assert first.logp == [-0.5, -0.25]
    assert first.spans == [VersionSpan("a", 0, 1), VersionSpan("b", 1, 2)]
    assert first.routed_experts is None


@pytest.mark.parametrize("given", [None, -9999.0])
def test_a_logprob_that_is_none_is_not_a_number(given):
    broken = choice(0, logprobs={"content": [entry(7, given), entry(2, -1.0)]})
    client = Script({"/inference/v1/generate": {"choices": [broken]}})
    (completion,) = ask(client, request())
    assert math.isnan(completion.logp[0])
    assert completion.logp[1] == -1.0


def test_routed_experts_are_read_where_they_are_wanted():
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    file = io.BytesIO()
    np.save(file, experts)
    text = base64.b64encode(file.getvalue()).decode()
    answers = {"/inference/v1/generate": {"choices": [choice(0, routed_experts=text)]}}
    (completion,) = ask(Script(answers), request(), routed_experts=True)
    np.testing.assert_array_equal(completion.routed_experts, experts)
    (completion,) = ask(Script(answers), request())
    assert completion.routed_experts is None


def test_an_array_of_objects_is_not_unpickled():
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    text = base64.b64encode(file.getvalue()).decode()
    with pytest.raises(ServerFault, match="cannot be read"):
        ask(
            Script({"/inference/v1/generate": {"choices": [choice(0, routed_experts=text)]}}),
            request(),
            routed_experts=True,
        )


@pytest.mark.parametrize(
    "broken", [{"finish_reason": "repetition"}, {"weight_versions": [{"version": "a"}]}, {"token_ids": ["x"]}]
)
def test_an_answer_that_cannot_be_read_is_a_fault(broken):
    with pytest.raises(ServerFault, match="cannot be read"):
        ask(Script({"/inference/v1/generate": {"choices": [choice(0, **broken)]}}), request())


def test_weights_are_loaded_in_this_order_and_named_last():
    client = Script({})
    asyncio.run(VllmDialect([2]).load(client, Path("/w/7"), "run.7", timeout_s=1))
    assert [path for path, _ in client.asked] == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/reset_prefix_cache",
        "/finish_weight_update",
    ]
    assert client.asked[2][1] == {"update_info": {"folder": "/w/7"}}
    assert client.asked[4][1] == {"weight_version": "run.7"}


def test_an_update_that_was_never_finished_is_finished_without_a_name_first():
    client = Script({"/start_weight_update": [ServerFault("already active"), {}]})
    asyncio.run(VllmDialect([2]).load(client, Path("/w/7"), "run.7", timeout_s=1))
    finishes = [body for path, body in client.asked if path == "/finish_weight_update"]
    assert finishes == [{}, {"weight_version": "run.7"}]


def test_progress_is_the_count_of_generated_tokens():
    text = '# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{engine="0"} 5.0\n'
    text += 'vllm:generation_tokens_total{engine="1"} 7.0\nvllm:prompt_tokens_total{engine="0"} 99.0\n'
    client = Script({"/metrics": {"text": text}})
    assert asyncio.run(VllmDialect([2]).progress(client, timeout_s=1)) == 12.0
    assert asyncio.run(VllmDialect([2]).progress(Script({"/metrics": {"text": ""}}), timeout_s=1)) is None
    with pytest.raises(ServerFault):
        asyncio.run(VllmDialect([2]).progress(Script({"/health": ServerFault("503")}), timeout_s=1))


def test_the_plugin_reads_every_tensor_of_a_checkpoint(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((1,), 3.0)}, tmp_path / "model-00002-of-00002.safetensors")
    read = dict(read_weights(tmp_path))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        "a": [1.0, 1.0],
        "b": [0.0, 0.0, 0.0],
        "c": [3.0],
    }
    with pytest.raises(FileNotFoundError, match=r"as seen from this server: set engine\.weights_dir"):
        list(read_weights(tmp_path / "elsewhere"))
