"""The arithmetic of memory against tensors, files and objects that are really made, on the bundled model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from steadyrl.config import ModelConfig, TrainerConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.errors import ConfigError
from steadyrl.models.checkpointing import checkpoint_layers
from steadyrl.models.load import load_policy
from steadyrl.models.logprobs import MAX_LOGITS
from steadyrl.pipeline.weights import WeightLayout
from steadyrl.planning.lengths import MeanLengths
from steadyrl.planning.memory import (
    activation_bytes,
    adam_bytes,
    checkpoint_bytes,
    head_bytes,
    memory_plan,
    most_snapshots,
    rollout_bytes_per_token,
)
from steadyrl.planning.model_count import KNOWN, count_model
from steadyrl.planning.placement import Placement
from steadyrl.recipe import build_config, load_config
from steadyrl.run import train
from steadyrl.trainer.optim import make_optimizer
from steadyrl.types import GenerationRequest, Prompt

TINY = "bundled:tiny_moe"
RECIPES = Path(__file__).parent.parent.parent / "recipes"


@pytest.fixture(scope="module")
def shape():
    return count_model(TINY)


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(path=TINY))


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- the model ----


def test_the_paper_s_model_has_30_5_billion_parameters_of_which_3_3_work_for_a_token():
    found = count_model("Qwen/Qwen3-30B-A3B-Base")
    c = KNOWN["Qwen/Qwen3-30B-A3B-Base"]
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    expert = 3 * hidden * c["moe_intermediate_size"]
    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * c["head_dim"]
    layer = attention + hidden * c["num_experts"] + c["num_experts"] * expert + 2 * hidden
    assert found.parameters == layers * layer + 2 * c["vocab_size"] * hidden + hidden
    assert found.largest_layer == layer
    assert round(found.parameters / 1e9, 1) == 30.5
    assert found.active_parameters == found.parameters - layers * (128 - 8) * expert
    assert 3.3 <= found.active_parameters / 1e9 < 3.4
    assert found.kv_bytes_per_token(2) == 2 * 48 * 4 * 128 * 2
    assert found.routed_expert_bytes_per_token == 48 * 8


def test_the_shape_is_that_of_the_loaded_model(shape, policy):
    assert shape.parameters == sum(parameter.numel() for parameter in policy.parameters())
    assert shape.parameter_tensors == len(list(policy.parameters()))
    experts = policy.model.layers[0].mlp.experts
    assert shape.expert_parameters == shape.layers * sum(parameter.numel() for parameter in experts.parameters())
    assert shape.largest_layer == sum(parameter.numel() for parameter in policy.model.layers[0].parameters())
    assert (shape.experts, shape.experts_per_token, shape.moe_layers) == (8, 2, 3)
    assert shape.active_parameters == shape.parameters - shape.expert_parameters * 6 // 8


def test_tied_weights_count_once(tmp_path):
    config = AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = count_model(str(tmp_path))
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 8 + 3 * 16 * 32 + 2 * 16
    assert found.parameters == 64 * 16 + 2 * layer + 16
    assert (found.moe_layers, found.active_parameters) == (0, found.parameters)


@pytest.mark.parametrize("content", ["{", '{"model_type": "unheard_of"}', '{"model_type": "vit"}'])
def test_a_folder_without_a_language_model_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"set model\.path to"):
        count_model(str(tmp_path))


# ---- the trainer ----


def test_weights_gradients_and_moments(shape, policy):
    model = load_policy(ModelConfig(path=TINY))
    optimizer = make_optimizer(model, TrainerConfig())
    model(input_ids=torch.arange(64).view(2, 32)).logits.sum().backward()
    for parameter in model.parameters():  # an expert that no token went through has no gradient, yet
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    optimizer.step()
    plan = memory_plan(shape, build_config({}), Placement(1, 1, 1), MeanLengths(10, 10, 15))
    item = {item.name: item.total for item in plan.trainer}
    assert item["weights"] == num_bytes(model.parameters())
    assert item["gradients"] == num_bytes(parameter.grad for parameter in model.parameters())
    assert item["AdamW moments"] == num_bytes(tree_leaves([optimizer.state[p] for p in model.parameters()]))
    assert item["AdamW moments"] == adam_bytes(shape)


def test_ranks_share_what_depends_on_the_parameters(shape):
    spread = ["trainer.kind=fsdp", "pipeline.backend=ray", "trainer.ranks=4"]
    plans = [
        memory_plan(shape, build_config({}, extra), Placement(ranks, 1, 1), MeanLengths(10, 10, 15))
        for ranks, extra in ((1, []), (4, spread))
    ]
    one, four = ({item.name: item for item in plan.trainer} for plan in plans)
    for name in ("weights", "gradients", "AdamW moments", "a copy of the weights", "reference weights"):
        assert four[name].total == one[name].total
        assert four[name].each == one[name].each / 4
    for name in ("activations", "logits"):
        assert four[name].each == one[name].each


MIXTURE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3_moe", {**MIXTURE, "num_key_value_heads": 4}),
        ("qwen3_moe", {**MIXTURE, "num_key_value_heads": 2}),
        ("qwen3_moe", {**MIXTURE, "num_key_value_heads": 1, "num_experts_per_tok": 4, "hidden_size": 96}),
        ("qwen3", {"num_key_value_heads": 2}),
    ],
)
def test_activations_are_what_autograd_keeps(tmp_path, kind, sizes, checkpointing, dtype):
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "head_dim": 16, "norm_topk_prob": True, **sizes,
        },
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="sdpa").eval()
    if checkpointing:
        checkpoint_layers(model)
    width = 24

    def kept(rows):
        """Bytes of the storages that the forward pass saves, but for the weights."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        saved, alive = {}, []

        def pack(tensor):
            alive.append(tensor)  # so that no storage takes the place of another
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        mask = torch.ones(rows, width, dtype=torch.int64)
        mask[0, 20:] = 0
        low = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), low:
            model.model(input_ids=torch.randint(0, 50, (rows, width)), attention_mask=mask)
        return sum(saved.values())

    shape = count_model(str(tmp_path))
    few, many = 8, 40  # the difference leaves out what does not depend on the tokens, such as weights in bfloat16
    tokens = (many - few) * width
    counted = activation_bytes(shape, dtype=dtype, tokens=tokens, width=width, checkpointing=checkpointing)
    if checkpointing:  # the recomputed layer is not there yet
        counted -= activation_bytes(
            dataclasses.replace(shape, layers=1), dtype=dtype, tokens=tokens, width=width, checkpointing=False
        )
        counted += 2 * 4 * shape.hidden * tokens  # embeddings and last norm, which went with it
    assert counted == pytest.approx(kept(many) - kept(few), rel=0.04)


def test_logits_come_in_blocks(shape):
    """benchmarks/results/2026-11-29_logprobs.md: 0.86 GiB over the inputs, 0.61 of these the two gradients."""
    large = dataclasses.replace(shape, hidden=1024, vocabulary=151_936)
    blocks = head_bytes(large, dtype="float32", tokens=8192) - 8192 * 1024 * 8
    assert blocks == 2 * 4 * MAX_LOGITS
    assert blocks / 2**30 == pytest.approx(0.86 - 0.61, abs=0.02)
    # a small vocabulary fits whole
    assert head_bytes(shape, dtype="float32", tokens=100) == 100 * shape.vocabulary * 8 + 100 * shape.hidden * 8


# ---- the engine, and what travels ----


@pytest.fixture(scope="module")
def engine():
    engine = build_local_engine(TINY, "bfloat16", 64, records_routing=True)
    engine.version = 0
    return engine


def request(prompts, samples, tokens):
    ids = [Prompt(f"p{index}", np.arange(5, 5 + 9, dtype=np.int32) + index, "", "") for index in range(prompts)]
    return GenerationRequest(ids, samples, tokens, temperature=1.0, seed=0, min_response_tokens=tokens)


def test_keys_and_values_of_the_decoder(shape, engine):
    engine.submit(request(3, 2, 20))
    for _ in range(8):
        engine.step()
    cache = engine._decoder._batch.cache
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    rows, width = held[0].shape[0], held[0].shape[2]
    assert (rows, width) == (6, 9 + 7)  # prompts, and all tokens but the newest one
    assert num_bytes(held) == rows * width * shape.kv_bytes_per_token(2)
    while engine.num_running:
        engine.step()


def test_a_token_on_its_way_to_the_trainer(shape, engine):
    config = build_config({}, ["model.routing_replay=true"])
    rollouts = engine.generate(request(2, 2, 20))
    arrays = [
        getattr(rollout, name)
        for rollout in rollouts
        for name in ("token_ids", "loss_mask", "behavior_logp", "versions", "routed_experts")
    ]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    untouched = len(rollouts) * shape.routed_expert_bytes_per_token  # the last token went through no expert
    assert sum(array.nbytes for array in arrays) == tokens * rollout_bytes_per_token(shape, config) - untouched


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_broadcast(shape, policy, dtype):
    config = build_config({}, [f"engine.dtype={dtype}"])
    layout = WeightLayout.of(dict(policy.named_parameters()), getattr(torch, dtype))
    plan = memory_plan(shape, config, Placement(1, 1, 1), MeanLengths(10, 10, 15))
    assert plan.broadcast_bytes == layout.num_bytes
    assert {item.name: item.total for item in plan.host}["weights under way"] == 2 * layout.num_bytes


# ---- a run ----


@pytest.mark.parametrize(("lag", "anchor"), [(3, "rollout"), (3, "old_actor"), (1, "rollout")])
def test_checkpoints_and_snapshots_of_a_run(tmp_path, shape, lag, anchor):
    config = load_config(
        RECIPES / "smoke.toml",
        [
            f"run_dir={tmp_path}/run", f"pipeline.lag={lag}", f"objective.anchor={anchor}", "pipeline.backend=inline",
            "pipeline.prompts_per_batch=2", "pipeline.responses_per_prompt=2", "trainer.steps=8",
            "checkpoint.every_steps=1", "checkpoint.keep=100", "evaluation.prompts=1", "evaluation.every_steps=0",
            "sampling.max_response_tokens=4",
        ],
    )  # fmt: skip
    train(config)
    most = 0
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        written = []
        for file in folder.rglob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                written += [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
        snapshots = len(list((folder / "snapshots").iterdir()))
        assert num_bytes(written) == checkpoint_bytes(shape, snapshots)
        step = int(folder.name.removeprefix("step_"))
        is_kept = step % lag == 0 and step < 8  # the present weights, which are not written twice
        most = max(most, snapshots + is_kept)
    assert most_snapshots(config) == most
