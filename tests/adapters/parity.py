"""The adapters against the frameworks' own code: `make test-adapters` runs this in an environment that has it.

Some of the frameworks compile parts of their losses; TORCHDYNAMO_DISABLE=1 lets them run as they are written.

Each framework gives two kinds of rows. Its own loss, and the objective that should equal it through the adapter. And
objectives that it does not have, SAT first, through the adapter and its own call path, against `policy_loss`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import typing
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions
from adapters.padded import Padded, difference, direct, make_padded, stand_in

from steadyrl.adapters import for_areal, for_openrlhf, for_skyrl, for_tinker, for_trl, for_trl_async, settings
from steadyrl.errors import ConfigError

CLIP = {"preset": "grpo", "boundary": {"low": 0.1, "high": 0.15}}
GSPO = {"preset": "gspo", "boundary": {"low": 0.02, "high": 0.03}}
SAT = ["sat-grpo", "sat-gspo", "sat-gspo-response", "sat-grpo-microbatch", "dppo-tv", "m2po"]
DTYPE = torch.float64


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """Some of the frameworks ask for the ranks of their group."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def installed(name: str) -> Path:
    """The folder of a package that is there without its dependencies, and is not to be imported as a whole."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def bare_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Put packages into sys.modules whose __init__ is not run, so that single modules of them can be imported."""
    root = installed(names[0])
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, module)


# ---- TRL ----


def trl_stub(batch: Padded, **changes: Any) -> Any:
    """What `_compute_loss` reads of a trainer; a model is not among it."""
    from trl import GRPOConfig

    values = {name: f.default for name, f in GRPOConfig.__dataclass_fields__.items()}
    values |= {"steps_per_generation": 1, "epsilon_high": None, **changes}
    args = SimpleNamespace(**values)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logp, torch.zeros_like(batch.logp), None),
        args=args,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        importance_sampling_level=values["importance_sampling_level"],
        beta=values["beta"],
        loss_type=values["loss_type"],
        epsilon_low=values["epsilon"],
        epsilon_high=values["epsilon_high"] or values["epsilon"],
        use_vllm=values["use_vllm"],
        vllm_importance_sampling_correction=values["vllm_importance_sampling_correction"],
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=values["max_completion_length"],
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _step=0,
    )


def trl_inputs(batch: Padded) -> dict[str, Any]:
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantage,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.behavior,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }


def trl_gradient(table: Any, batch: Padded, **changes: Any) -> torch.Tensor:
    """Through the adapter, on the same stand-in."""
    stub = trl_stub(batch, use_vllm=True, vllm_importance_sampling_correction=False, **changes)
    trainer = type("Trainer", (for_trl.GRPOObjective,), {"objective": table, "__init__": lambda self: None})()
    trainer.__dict__.update(vars(stub), _window_left=0, _window_threshold=None)
    trainer._steadyrl = for_trl.checked(trainer)
    loss = trainer._compute_loss(None, trl_inputs(batch))
    assert stub._metrics["train"]["mismatch/d_bar"]
    return torch.autograd.grad(loss, batch.logp)[0]


TRL_OWN = [
    ("grpo", {}, CLIP),
    ("bnpo", {}, CLIP),
    ("dr_grpo", {"max_completion_length": 40}, CLIP),
    ("dapo", {}, CLIP),
    ("grpo", {"beta": 0.2, "use_bias_correction_kl": False}, CLIP),
    ("grpo", {"delta": 1.3}, {"preset": "grpo-dual-clip", "boundary": {"low": 0.1, "high": 0.15, "dual": 1.3}}),
    ("grpo", {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}, GSPO),
    ("luspo", {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}, GSPO),
]


KEPT = ("beta", "use_bias_correction_kl", "max_completion_length")


@pytest.mark.parametrize(("loss_type", "changes", "table"), TRL_OWN)
def test_trl_own_losses(loss_type, changes, table, compared):
    from trl import GRPOTrainer

    batch = make_padded(dtype=DTYPE).leaf()
    theirs = {"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.15, **changes}
    loss = GRPOTrainer._compute_loss(trl_stub(batch, **theirs), None, trl_inputs(batch))
    expected = torch.autograd.grad(loss, batch.logp)[0]
    kept = {name: value for name, value in changes.items() if name in KEPT}
    found = trl_gradient({**table, "anchor": "old_actor"}, batch, loss_type=loss_type, steps_per_generation=2, **kept)
    if loss_type == "dapo":
        found = found / 2  # two steps on the tokens that are counted
    name = ", ".join([loss_type, *(f"{key}={value}" for key, value in changes.items())])
    compared("TRL", name, difference(found, expected))


@pytest.mark.parametrize("preset", [*SAT, "grpo-tis", "geo-rs"])
def test_trl_objectives(preset, compared):
    batch = make_padded(dtype=DTYPE, drift=0.01 if preset == "geo-rs" else 0.1).leaf()
    found = trl_gradient({"preset": preset}, batch, loss_type="bnpo", steps_per_generation=2)
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch)
    compared("TRL", preset, difference(found, expected))


def test_trl_asynchronous(compared):
    """Two responses in a packed row: TRL's clip, and SAT."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    batch = make_padded(rows=2, dtype=DTYPE)
    tokens = int(batch.mask.sum())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logp = torch.nn.Parameter(batch.logp[batch.mask][None].clone())

        def forward(self, **_: Any) -> Any:
            return SimpleNamespace(log_probs=self.logp, entropy=torch.zeros_like(self.logp))

    whole = torch.arange(tokens)[None]
    inputs = {
        **dict.fromkeys(("input_ids", "position_ids", "shift_labels", "token_index", "tree_kv_index"), whole),
        **dict.fromkeys(("tree_cu_seqlens_q", "tree_cu_seqlens_k"), whole),
        "attention_mask": torch.ones(1, tokens, dtype=torch.long),
        "old_log_probs": batch.behavior[batch.mask][None],
        "advantages": batch.spread(batch.advantage)[batch.mask][None],
        "segment_id": torch.arange(2)[:, None].expand(2, batch.width)[batch.mask][None],
        "tree_max_seqlens": torch.tensor([[tokens, tokens]]),
        "global_n_tokens": torch.tensor([tokens]),
        "global_n_forward_tokens": torch.tensor([tokens]),
        "mean_seq_len": torch.tensor([tokens / 2]),
    }
    host = {
        "epsilon_low": 0.1,
        "epsilon_high": 0.15,
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "current_gradient_accumulation_steps": 2,
        "aux_loss_enabled": False,
        **dict.fromkeys(
            ("_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted", "_step_samples"), 0.0
        ),
        "_step_forward_s": 0.0,
    }
    model = Model()
    own = SimpleNamespace(**host, _metrics={"train": defaultdict(list)})
    theirs = torch.autograd.grad(AsyncGRPOTrainer.compute_loss(own, model, inputs), model.logp)[0]
    for table, expected in ((CLIP, theirs), ("sat-gspo", None)):
        members = {"objective": table, "__init__": lambda self: None}
        trainer = type("Trainer", (for_trl_async.AsyncGRPOObjective, AsyncGRPOTrainer), members)()
        trainer.__dict__.update(host, _metrics={"train": defaultdict(list)})
        trainer._steadyrl = settings.objective_for(for_trl_async.ASYNC, table)
        found = torch.autograd.grad(trainer.compute_loss(model, inputs), model.logp)[0]
        if expected is None:
            expected = direct({"preset": table, "aggregation": "token_mean"}, batch)[1][batch.mask][None] / 2
        assert trainer._metrics["train"]["mismatch/d_bar"]
        compared("TRL asynchronous", "own clip" if table is CLIP else table, difference(found, expected))


# ---- verl ----


def verl_config(mode: str, **policy: Any) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    if policy:
        from steadyrl.adapters.verl_plugin import ObjectivePolicyLossConfig

        chosen = ObjectivePolicyLossConfig(**policy)
    else:
        chosen = PolicyLossConfig(loss_mode=mode)
    return ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.1, clip_ratio_high=0.15, policy_loss=chosen
    )


def verl_gradient(
    name: str, batch: Padded, config: Any, mode: str, anchor: torch.Tensor, weights: Any = None
) -> torch.Tensor:
    """The call of verl's own `ppo_loss`, with counts of a larger batch on two ranks."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config.global_batch_info.update(dp_size=2, batch_num_tokens=200, global_batch_size=20, loss_scale_factor=30)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=anchor,
        log_prob=batch.logp,
        advantages=batch.spread(batch.advantage),
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    assert all(isinstance(value, float) for value in metrics.values())
    return torch.autograd.grad(loss, batch.logp)[0]


DUAL = {"preset": "grpo-dual-clip", "boundary": {"low": 0.1, "high": 0.15}}
VERL_OWN = [
    ("vanilla", "token-mean", DUAL),
    ("vanilla", "seq-mean-token-mean", DUAL),
    ("vanilla", "seq-mean-token-sum", DUAL),
    ("vanilla", "seq-mean-token-sum-norm", DUAL),
    ("vanilla", "token-sum", DUAL),
    ("gspo", "seq-mean-token-mean", {"preset": "gspo", "boundary": {"low": 0.1, "high": 0.15}}),
    ("sapo", "seq-mean-token-mean", {"preset": "sapo"}),
    ("dppo_tv", "token-mean", {"preset": "dppo-tv", "boundary": {"low": 0.1, "high": 0.15, "cap": 3.0}}),
    ("cispo", "token-mean", {"preset": "cispo", "boundary": {"low": 0.1, "high": 0.15}}),
]


@pytest.mark.parametrize(("own", "mode", "table"), VERL_OWN)
def test_verl_own_losses(own, mode, table, compared):
    import steadyrl.adapters.verl_plugin  # noqa: F401  registers the loss

    batch = make_padded(dtype=DTYPE).leaf()
    expected = verl_gradient(own, batch, verl_config(own), mode, batch.behavior)
    adapted = verl_config("steadyrl", objective=table, bypass_mode=True)
    found = verl_gradient("steadyrl", batch, adapted, mode, batch.behavior)
    compared("verl", f"{own}, {mode}", difference(found, expected))


def test_verl_weights(compared):
    batch = make_padded(dtype=DTYPE).leaf()
    weights = (batch.old - batch.behavior).exp().clamp(max=1.05)
    expected = verl_gradient("vanilla", batch, verl_config("vanilla"), "token-mean", batch.old, weights)
    adapted = verl_config("steadyrl", objective={**DUAL, "anchor": "step_start"}, steps_per_batch=4)
    found = verl_gradient("steadyrl", batch, adapted, "token-mean", batch.old, weights)
    compared("verl", "vanilla with rollout_is_weights", difference(found, expected))
    bypassed = verl_config("steadyrl", objective="sat-gspo", bypass_mode=True)
    with pytest.raises(ConfigError, match="count the mismatch twice"):
        verl_gradient("steadyrl", batch, bypassed, "token-mean", batch.behavior, weights)


@pytest.mark.parametrize("preset", SAT)
def test_verl_objectives(preset, compared):
    batch = make_padded(dtype=DTYPE).leaf()
    config = verl_config("steadyrl", objective={"preset": preset}, bypass_mode=True)
    found = verl_gradient("steadyrl", batch, config, "token-mean", batch.behavior)
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch)
    compared("verl", preset, difference(found * 200 / 2, expected * batch.counts.num_tokens))


def test_verl_makes_the_table_from_its_own_configuration():
    """Hydra's overrides of the recipe, resolved and instantiated as verl does it."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    whole = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": True}},
            "policy_loss": {
                "_target_": "steadyrl.adapters.verl_plugin.ObjectivePolicyLossConfig",
                "loss_mode": "steadyrl",
                "objective": {"preset": "sat-grpo", "boundary": {"high": 0.1}},
                "bypass_mode": "${algorithm.rollout_correction.bypass_mode}",
            },
        }
    )
    made = omega_conf_to_dataclass(whole.policy_loss)
    assert made.loss_mode == "steadyrl"
    from steadyrl.adapters.for_verl import objective_of

    assert objective_of(made).boundary.high == 0.1
    whole.algorithm.rollout_correction.bypass_mode = False
    with pytest.raises(Exception, match="bypass_mode=True"):
        omega_conf_to_dataclass(whole.policy_loss)


def test_verl_loads_the_plugin_by_its_environment_variable():
    import subprocess

    code = (
        "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('steadyrl').__module__)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "steadyrl.adapters.verl_plugin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "steadyrl.adapters.for_verl"


# ---- miles ----


def miles_data(batch: Padded) -> dict[str, Any]:
    """Samples of two prompt tokens and the tokens of a row, as miles keeps them."""
    masks = [part.int() for part in batch.split(batch.mask)]
    lengths = [len(mask) for mask in masks]
    random = torch.Generator().manual_seed(5)
    return {
        "unconcat_tokens": [torch.randint(11, (2 + n,), generator=random) for n in lengths],
        "total_lengths": [2 + n for n in lengths],
        "response_lengths": lengths,
        "loss_masks": masks,
        "advantages": [a.expand(n) for a, n in zip(batch.advantage, lengths, strict=True)],
        "rollout_log_probs": batch.split(batch.behavior),
        "log_probs": batch.split(batch.old),
        "ref_log_probs": batch.split(batch.reference),
    }


def miles_arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            **{"rollout_temperature": 1.0, "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0},
            **{"kl_loss_type": "low_var_kl", "use_unbiased_kl": False, "use_opsm": False, "use_tis": False},
            **{"get_mismatch_metrics": False, "use_rollout_logprobs": True, "advantage_estimator": "grpo"},
            **{"eps_clip": 0.1, "eps_clip_high": 0.15, "qkv_format": "thd", "calculate_per_token_loss": False},
            **{"log_probs_chunk_size": -1, "true_on_policy_mode": False, "allgather_cp": False, "tis_clip": 2.0},
            **{"tis_clip_low": 0.0, "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None},
            **{"rollout_batch_size": 8, "n_samples_per_prompt": 2, "global_batch_size": 4, "loss_type": "policy_loss"},
            **{"recompute_loss_function": False, "use_dynamic_global_batch_size": False, "dump_details": None},
            **{"custom_loss_function_path": "steadyrl.adapters.for_miles.policy_loss"},
            **changes,
        }
    )


@pytest.fixture
def miles(monkeypatch):
    """miles' loss module on one rank."""
    from miles.backends.training_utils import loss
    from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state

    one = GroupInfo(rank=0, size=1, group=torch.distributed.group.WORLD)
    set_parallel_state(ParallelState(**dict.fromkeys(("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp"), one)))
    return loss


def miles_gradient(miles: Any, args: Any, batch: Padded) -> torch.Tensor:
    """Of miles' own dispatcher, with respect to the log-probabilities, which stand in for a model's logits."""
    scored = {"log_probs": batch.split(batch.logp), "entropy": batch.split(batch.logp**2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miles, "get_log_probs_and_entropy", lambda *_, **__: scored)
        scaled, _, report = miles.loss_function(args, miles_data(batch), 1, torch.zeros(1, requires_grad=True))
    assert len(report["keys"]) + 1 == len(report["values"])
    return torch.autograd.grad(scaled, batch.logp)[0]


MILES_OWN = [
    ("grpo", {}, CLIP),
    ("grpo, per token", {"calculate_per_token_loss": True}, CLIP),
    ("grpo, kl 0.1", {"use_kl_loss": True, "kl_loss_coef": 0.1}, CLIP),
    ("gspo", {"advantage_estimator": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03}, GSPO),
    ("grpo, entropy 0.01", {"entropy_coef": 0.01}, CLIP),
]


@pytest.mark.parametrize(("name", "changes", "table"), MILES_OWN)
def test_miles_own_losses(name, changes, table, compared, miles):
    batch = make_padded(dtype=DTYPE).leaf()
    expected = miles_gradient(miles, miles_arguments(**changes), batch)
    adapted = miles_arguments(**changes, steadyrl_objective=table)
    adapted.loss_type = "custom_loss"
    compared("miles", name, difference(miles_gradient(miles, adapted, batch), expected))


@pytest.mark.parametrize("preset", [*SAT, "grpo-tis"])
def test_miles_objectives(preset, compared, miles):
    batch = make_padded(dtype=DTYPE).leaf()
    args = miles_arguments(
        steadyrl_objective={"preset": preset},
        loss_type="custom_loss",
        keep_old_actor=preset == "grpo-tis",
        use_rollout_logprobs=preset != "grpo-tis",
    )
    _, expected = direct({"preset": preset, "aggregation": "sequence_mean"}, batch)
    scale = batch.rows / args.global_batch_size
    compared("miles", preset, difference(miles_gradient(miles, args, batch), expected * scale))


def test_miles_from_the_logits(compared, miles):
    """The same call with miles' own log-probabilities of logits, whose backward pass rounds to bfloat16."""
    data = miles_data(make_padded(dtype=torch.float32))
    logits = torch.randn(1, sum(data["total_lengths"]), 11, generator=torch.Generator().manual_seed(1)).requires_grad_()
    data["rollout_log_probs"] = data["log_probs"] = [torch.full((n,), -2.4) for n in data["response_lengths"]]
    gradients = []
    for changes in ({}, {"loss_type": "custom_loss", "steadyrl_objective": CLIP}):
        scaled, *_ = miles.loss_function(miles_arguments(**changes), data, 1, logits)
        gradients.append(torch.autograd.grad(scaled, logits)[0])
    compared("miles", "grpo, from the logits", difference(gradients[1], gradients[0]))


def test_miles_corrections_by_its_own_hook(compared, miles):
    """TIS is miles' own; the hook gives the same."""
    batch = make_padded(dtype=DTYPE, drift=0.4).leaf()
    plain = {"use_tis": True, "use_rollout_logprobs": False, "tis_clip": 1.1}
    expected = miles_gradient(miles, miles_arguments(**plain), batch)
    hooks = {"custom_tis_function_path": "steadyrl.adapters.for_slime_hooks.correction"}
    table = {"preset": "grpo-tis", "correction": {"cap": 1.1}}
    found = miles_gradient(miles, miles_arguments(**plain, **hooks, steadyrl_objective=table), batch)
    compared("miles", "own TIS by the hook", difference(found, expected))


# ---- SkyRL ----


@pytest.fixture(scope="module")
def skyrl():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)  # its pydantic models ask for Python 3.12's
        import skyrl.backends.skyrl_train.utils.ppo_utils as module
    for_skyrl.register()
    return module


def skyrl_config(**changes: Any) -> SimpleNamespace:
    off = SimpleNamespace(
        tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
    )  # fmt: skip
    values = {"policy_loss_type": "regular", "eps_clip_low": 0.1, "eps_clip_high": 0.15, "clip_ratio_c": 3.0}
    values |= {"loss_reduction": "token_mean", "off_policy_correction": off, "steps_per_batch": 2}
    values |= {"dppo": SimpleNamespace(dppo_type="binary_tv", delta_low=0.1, delta_high=0.15)}
    return SimpleNamespace(**{**values, **changes})


def skyrl_gradient(module: Any, name: str, batch: Padded, config: Any, advantages: torch.Tensor) -> torch.Tensor:
    loss, metrics = module.PolicyLossRegistry.get(name)(
        batch.logp, batch.old, advantages, config=config, loss_mask=batch.mask.double(), rollout_logprobs=batch.behavior
    )
    assert all(isinstance(value, float) for value in metrics.values())
    return torch.autograd.grad(loss, batch.logp)[0]


SKYRL_OWN = [
    ("regular", "token_mean", {**CLIP, "anchor": "step_start"}),
    ("dual_clip", "token_mean", {**DUAL, "anchor": "step_start"}),
    ("gspo", "sequence_mean", {"preset": "gspo", "anchor": "step_start", "boundary": {"low": 0.1, "high": 0.15}}),
    ("dppo", "token_mean", {"preset": "dppo-tv", "boundary": {"low": 0.1, "high": 0.15, "cap": 1e6}}),
]


@pytest.mark.parametrize(("own", "reduction", "table"), SKYRL_OWN)
def test_skyrl_own_losses(own, reduction, table, compared, skyrl):
    batch = make_padded(dtype=DTYPE).leaf()
    scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(
        batch.spread(batch.advantage), batch.mask.double(), reduction, batch.rows, batch.width
    )
    expected = skyrl_gradient(skyrl, own, batch, skyrl_config(policy_loss_type=own), scaled)
    found = skyrl_gradient(skyrl, "steadyrl", batch, skyrl_config(objective=table), scaled)
    compared("SkyRL", f"{own}, {reduction}", difference(found, expected))


@pytest.mark.parametrize("preset", SAT)
def test_skyrl_objectives(preset, compared, skyrl):
    batch = make_padded(dtype=DTYPE).leaf()
    scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(
        batch.spread(batch.advantage), batch.mask.double(), "token_mean", batch.rows, batch.width
    )
    found = skyrl_gradient(skyrl, "steadyrl", batch, skyrl_config(objective={"preset": preset}), scaled)
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch)
    compared("SkyRL", preset, difference(found, expected))


# ---- OpenRLHF ----


@pytest.fixture
def openrlhf(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))  # a helper beside the loss imports it
    bare_packages(monkeypatch, "openrlhf", "openrlhf.models")
    return importlib.import_module("openrlhf.models.loss")


COUNTS = {"dp_size": 2, "batch_num_tokens": 200.0, "global_batch_size": 20.0}
OPENRLHF_OWN = [("ppo", True, {}, CLIP), ("ppo", False, {}, CLIP), ("gspo", False, GSPO["boundary"], GSPO)]


@pytest.mark.parametrize(("own", "per_token", "radii", "table"), OPENRLHF_OWN)
def test_openrlhf_own_losses(own, per_token, radii, table, compared, openrlhf):
    batch = make_padded(dtype=DTYPE).leaf()
    low, high = radii.get("low", 0.1), radii.get("high", 0.15)
    theirs = openrlhf.PolicyLoss(low, high, token_level_loss=per_token, policy_loss_type=own)
    arguments = (batch.logp, batch.old, batch.spread(batch.advantage), batch.mask)
    expected = torch.autograd.grad(theirs(*arguments, **COUNTS)[0], batch.logp)[0]
    ours = for_openrlhf.ObjectivePolicyLoss(
        {**table, "anchor": "step_start"}, 2, openrlhf.aggregate_loss, token_level_loss=per_token, dual_clip=None
    )
    results = ours(*arguments, rollout_log_probs=batch.behavior, **COUNTS)
    assert len(results) == 5  # (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)
    assert float(results[2]) == pytest.approx(float(theirs(*arguments, **COUNTS)[2]))
    found = torch.autograd.grad(results[0], batch.logp)[0]
    compared("OpenRLHF", f"{own}, {'token' if per_token else 'sequence'} mean", difference(found, expected))


@pytest.mark.parametrize("preset", SAT)
def test_openrlhf_objectives(preset, compared, openrlhf):
    batch = make_padded(dtype=DTYPE).leaf()
    ours = for_openrlhf.ObjectivePolicyLoss({"preset": preset}, None, openrlhf.aggregate_loss)
    loss, *_ = ours(batch.logp, batch.old, batch.spread(batch.advantage), batch.mask, batch.behavior)
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch)
    assert "mismatch/d_bar" in ours.metrics
    compared("OpenRLHF", preset, difference(torch.autograd.grad(loss, batch.logp)[0], expected))


# ---- AReaL ----


@pytest.fixture
def areal(monkeypatch):
    bare_packages(monkeypatch, "areal", "areal.utils", "areal.utils.functional", "areal.api")
    # used in annotations, and by losses that are not compared
    stand_in(monkeypatch, "areal.api.cli_args", RejectionSamplingConfig=object)
    stand_in(monkeypatch, "areal.utils.data", KLEstimator=object)
    stand_in(monkeypatch, "areal.utils.stats_tracker", scalar=lambda **values: None)
    return importlib.import_module("areal.utils.functional.functional")


def areal_input(batch: Padded) -> dict[str, torch.Tensor]:
    inside = torch.ones_like(batch.mask)
    bounds = torch.arange(batch.rows + 1) * batch.width
    return {
        "logprobs": batch.behavior[inside],
        "prox_logp": batch.old[inside],
        "advantages": batch.spread(batch.advantage)[inside],
        "loss_mask": batch.mask[inside],
        "cu_seqlens": bounds,
        "versions": torch.full_like(batch.mask[inside], 3, dtype=torch.int64),
    }


@pytest.mark.parametrize(("level", "table"), [("token", CLIP), ("sequence", GSPO)])
def test_areal_own_losses(level, table, compared, areal):
    batch = make_padded(dtype=DTYPE).leaf()
    data, flat = areal_input(batch), batch.logp.reshape(-1)
    radii = table["boundary"]
    loss, _ = areal.ppo_actor_loss_fn(
        logprobs=flat,
        proximal_logprobs=data["prox_logp"],
        old_logprobs=data["logprobs"],
        advantages=data["advantages"],
        eps_clip=radii["low"],
        eps_clip_higher=radii["high"],
        loss_mask=data["loss_mask"],
        importance_sampling_level=level,
        cu_seqlens=data["cu_seqlens"],
    )
    expected = torch.autograd.grad(loss, batch.logp, retain_graph=True)[0]
    objective = settings.objective_for(for_areal.AREAL, {**table, "anchor": "step_start"}, 4)
    found = for_areal.loss(flat, torch.zeros_like(flat), data, objective=objective, current_version=4)
    compared("AReaL", f"ppo, {level} level", difference(torch.autograd.grad(found, batch.logp)[0], expected))


@pytest.mark.parametrize("preset", [*SAT, "sat-grpo-lag", "a3po"])
def test_areal_objectives(preset, compared, areal):
    batch = make_padded(dtype=DTYPE).leaf()
    flat = batch.logp.reshape(-1)
    objective = settings.objective_for(for_areal.AREAL, preset)
    loss = for_areal.loss(flat, torch.zeros_like(flat), areal_input(batch), objective=objective, current_version=7)
    age = torch.full(batch.mask.shape, 4)
    _, expected = direct({"preset": preset, "aggregation": "token_mean"}, batch, age=age)
    compared("AReaL", preset, difference(torch.autograd.grad(loss, batch.logp)[0], expected))


# ---- tinker ----


@pytest.mark.parametrize("preset", [*SAT, "sat-grpo-lag", "gspo-tis", "a3po", "dr-grpo"])
def test_tinker_objectives(preset, compared):
    """Through the client's own code: what it sends to the server are weights = -gradient."""
    import tinker
    from tinker.lib.public_interfaces.training_client import TrainingClient

    batch = make_padded(dtype=torch.float32, drift=0.2)
    rows = {name: batch.split(getattr(batch, name)) for name in ("logp", "behavior", "old", "mask")}
    data, outputs = [], []
    for row in range(batch.rows):
        n = len(rows["logp"][row])
        fields = {
            "target_tokens": torch.zeros(n, dtype=torch.int64),
            "logprobs": rows["behavior"][row],
            "advantages": batch.advantage[row].expand(n).contiguous(),
            "mask": rows["mask"][row].float(),
            "versions": torch.full((n,), 3),
            "old_logprobs": rows["old"][row],
        }
        inputs = {name: tinker.TensorData.from_torch(value) for name, value in fields.items()}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints([1] * n), loss_fn_inputs=inputs))
        outputs.append({"logprobs": tinker.TensorData.from_torch(rows["logp"][row])})
    forward = tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={})
    result = TrainingClient._compute_custom_loss(data, for_tinker.custom_loss(preset, version=7), forward)
    assert "mismatch/d_bar" in result.metrics
    _, expected = direct({"preset": preset}, batch, age=torch.full(batch.mask.shape, 4))
    sent = [torch.as_tensor(datum.loss_fn_inputs["weights"].to_torch()) for datum in result.data]
    found = torch.cat([-weights.reshape(-1) for weights in sent])
    compared("tinker", preset, difference(found, torch.cat(batch.split(expected))))


def test_the_versions_are_those_of_the_table_in_the_docs():
    text = (Path(__file__).parent.parent.parent / "docs" / "adapters.md").read_text(encoding="utf-8")
    for name in ("trl", "verl", "tinker", "miles-rl", "skyrl", "openrlhf", "areal"):
        assert f"{name} {importlib.metadata.version(name)}" in text
