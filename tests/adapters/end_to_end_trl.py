"""TRL's `GRPOTrainer` trains the bundled model on the CPU: five optimizer steps with its own loss, and with ours."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.padded import difference

from steadyrl.adapters.for_trl import GRPOObjective
from steadyrl.errors import ConfigError

MODEL = str(Path(__file__).parent.parent.parent / "src" / "steadyrl" / "assets" / "tiny_moe")
STEPS = 5


def right_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The number after the last comma of "3+8+2=11,13" is the sum; half a point for the right first one."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        terms = [int(term) for term in prompt.rstrip("=").split("+")]
        partial = completion.strip().split(",")
        scores.append(0.5 * (partial[0] == str(sum(terms[:2]))) + float(partial[-1] == str(sum(terms))))
    return scores


def arguments(folder: Path, **changes: Any) -> Any:
    from trl import GRPOConfig

    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,  # two optimizer steps on each generation: ratios move away from 1
        "num_generations": 4,
        "max_completion_length": 10,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "beta": 0.0,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return GRPOConfig(**{**values, **changes})


@cache
def trained(objective: str | None, folder: Path, **changes: Any) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """All weights end to end after the last step, and what was logged at each."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    numbers = random.Random(0)
    prompts = ["+".join(str(numbers.randint(1, 9)) for _ in range(3)) + "=" for _ in range(64)]
    bases: tuple[type, ...] = (GRPOTrainer,) if objective is None else (GRPOObjective, GRPOTrainer)
    trainer = type("Trainer", bases, {"objective": objective})(
        model=MODEL,
        args=arguments(folder, **changes),
        reward_funcs=right_sum,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return weights, [entry for entry in trainer.state.log_history if "grad_norm" in entry]  # one per optimizer step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


def test_with_its_own_objective_the_weights_are_those_of_trl(folder):
    own, log = trained(None, folder)
    ours, ours_log = trained("grpo", folder)
    start = trained("grpo", folder, max_steps=1, learning_rate=0.0)[0]
    assert float((own - start).abs().max()) > 1e-3  # it trained
    assert all("mismatch/d_bar" in entry for entry in ours_log)  # ours it was
    assert not any("mismatch/d_bar" in entry for entry in log)
    rewards = [entry["reward"] for entry in log if "reward" in entry]  # one per generation
    assert len(rewards) == 3
    assert [entry["reward"] for entry in ours_log if "reward" in entry] == rewards  # the same data
    assert [entry["loss"] for entry in ours_log] == pytest.approx([entry["loss"] for entry in log], abs=1e-6)
    assert difference(ours - start, own - start) < 1e-3  # of what training changed; Adam makes rounding visible


def test_sat_trains_on_the_same_data_with_sensible_metrics(folder):
    _, own = trained(None, folder)
    weights, log = trained("sat-grpo", folder)
    assert torch.isfinite(weights).all()
    assert len(log) == len(own) == STEPS
    assert log[0]["reward"] == own[0]["reward"]  # the first generation is the same
    for entry in log:
        assert 0 <= entry["sat/intervention_rate"] <= entry["sat/gate_rate"] <= 0.1 + 1e-6
        assert 0 < entry["sat/radius_high"] <= 0.2 + 1e-6
        assert entry["mismatch/not_finite"] == 0
        assert entry["entropy"] > 0
        assert entry["aux_loss"] > 0
    # the first step on a generation is on-policy, the second one is not: q shows it
    assert log[1]["sat/q"] > 10 * log[0]["sat/q"]
    assert log[1]["mismatch/d_bar"] > 1e-4


def test_the_quantile_of_the_batch_does_not_depend_on_the_micro_batches(folder):
    """Two micro-batches of 8, scored before the first, or one of 16."""
    whole = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    same = {"loss_type": "dapo", "max_steps": 2}
    cut, cut_log = trained("sat-gspo", folder, router_aux_loss_coef=0.0, **same)
    joined, joined_log = trained("sat-gspo", folder, router_aux_loss_coef=0.0, **same, **whole)
    assert cut_log[1]["sat/q"] == pytest.approx(joined_log[1]["sat/q"], rel=1e-3)
    assert difference(cut, joined) < 1e-4


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"steps_per_generation": 2}, "sat-gspo", "every ratio is 1"),
        ({"steps_per_generation": 3, "per_device_train_batch_size": 4}, "sat-gspo", "multiple of gradient_accum"),
        ({"loss_type": "sapo"}, "sat-gspo", "rule of TRL's own"),
        ({"delta": 3.0}, "sat-gspo", "set delta=None"),
        ({}, "icepop", "without vLLM"),
        ({}, {"preset": "sat-gspo", "kl_coef": 0.1}, "set beta"),
        ({}, "sat-grpo-ema", "quantile_scope"),
    ],
)
def test_what_is_refused_before_the_first_step(folder, changes, objective, message):
    from steadyrl.adapters.for_trl import checked

    class Host:
        pass

    host = Host()
    host.args, host.objective = arguments(folder, **changes), objective
    with pytest.raises(ConfigError, match=message):
        checked(host)


def test_two_weights_for_one_mismatch_are_refused(folder):
    from types import SimpleNamespace

    from steadyrl.adapters.for_trl import checked

    args = arguments(folder)
    args.use_vllm = True
    with pytest.raises(ConfigError, match="set vllm_importance_sampling_correction=False"):
        checked(SimpleNamespace(args=args, objective="sat-gspo"))
    with pytest.raises(ConfigError, match="applied twice"):
        checked(SimpleNamespace(args=args, objective="icepop"))
    args.vllm_importance_sampling_correction = False
    assert checked(SimpleNamespace(args=args, objective="icepop")).correction is not None
