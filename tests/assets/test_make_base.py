"""The bundled base model: what it can do, and that it can be made again."""

from __future__ import annotations

from pathlib import Path

import torch

from steadyrl.assets.make_base import SHAPE, make_base
from steadyrl.config import EvaluationConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.evaluation.evaluate import evaluation_request, score
from steadyrl.models.load import load_model
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.arithmetic import Arithmetic

TINY = "bundled:tiny_moe"


def test_it_solves_some_of_the_task_and_nearly_all_in_sixteen_tries(tokenizer):
    engine = build_local_engine(TINY, "bfloat16", 1024, records_routing=False)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=0)
    task = Arithmetic(ArithmeticTask(), tokenizer, 0)
    request = evaluation_request(task, EvaluationConfig(prompts=128, samples_per_prompt=16), seed=0)
    row = score(task, request, engine.generate(request))
    assert 0.25 <= row["avg_at_k"] <= 0.45
    assert row["pass_at_k"] > 0.9
    assert row["truncated"] < 0.01


def test_it_has_the_promised_shape(model):
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok, config.head_dim) == (3, 8, 2, 32)
    assert {name: getattr(config, name) for name in SHAPE} == SHAPE
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_base(tmp_path / name, seed=seed, steps=3)
    first, again, other = (contents(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
