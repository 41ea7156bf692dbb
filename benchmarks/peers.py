"""Do other libraries' own loss functions give the gradient that ours gives?

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0 trl==1.16.0 verl==0.9.1 orjson pydantic
    python benchmarks/peers.py --python /tmp/peers/bin/python [--out benchmarks/peers.md]

The environment is a separate one, because the peers pin other versions than steadyrl does. There, the real
functions run: `GRPOTrainer._compute_loss` of TRL, called unbound on a stand-in that supplies log-probabilities in
place of a model, and verl's registered policy losses with verl's own `ActorConfig`. Both get the inputs that
`policy_loss` gets; what is compared is the gradient with respect to the current log-probabilities. Aggregation
constants differ between libraries, so the peer's gradient is first scaled by the one factor that fits best; the
factor is printed. The number is the largest difference over the largest entry of our gradient.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
RESPONSES, LONGEST = 32, 48


@dataclass(frozen=True)
class Case:
    """One loss of a peer, and the objective that should equal it."""

    peer: str  # trl or verl
    loss: str
    peer_values: dict[str, Any]
    objective: dict[str, Any]
    note: str = ""  # why they differ, where they do on purpose
    agrees: bool = True


def cases() -> list[Case]:
    return [*trl_cases(), *verl_cases()]


def trl_cases() -> list[Case]:
    clip = {"rule": "clip", "low": 0.2, "high": 0.2}
    grpo = {"preset": "grpo", "boundary": clip}
    return [
        Case("trl", "grpo", {}, {**grpo, "aggregation": "sequence_mean"}),
        Case("trl", "bnpo", {}, grpo),
        Case(
            "trl",
            "dr_grpo",
            {"max_completion_length": LONGEST},
            {"preset": "dr-grpo", "boundary": clip, "aggregation_tokens": LONGEST},
        ),
        Case("trl", "dapo", {"epsilon_high": 0.28}, {"preset": "dapo"}),
        Case("trl", "grpo, delta = 3", {"delta": 3.0}, {"preset": "grpo-dual-clip", "aggregation": "sequence_mean"}),
        Case(
            "trl",
            "grpo, sequence level",
            {"level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
            {"preset": "gspo-published"},
        ),
        Case("trl", "cispo", {"epsilon_high": 5.0}, {"preset": "cispo"}),
        Case("trl", "sapo", {}, {"preset": "sapo"}, "TRL keeps the temperature 1.05 in float32"),
        Case(
            "trl",
            "luspo",
            {"level": "sequence"},
            {"preset": "gspo", "boundary": clip, "aggregation": "sequence_sum"},
            "no preset of its own: GSPO with the sum over the response",
        ),
        Case("trl", "vespo", {}, {"preset": "vespo", "aggregation": "sequence_sum"}, SPREAD),
        Case(
            "trl",
            "grpo, off-policy mask 0.1",
            {"off_policy": 0.1},
            {"preset": "opsm", "aggregation": "sequence_mean"},
        ),
        Case("trl", "grpo, beta = 0.1 (k3)", {"beta": 0.1}, {**grpo, "aggregation": "sequence_mean", "kl_coef": 0.1}),
        Case(
            "trl",
            "grpo, importance sampling ratio",
            {"correction": True},
            {"preset": "grpo-tis", "aggregation": "sequence_mean"},
        ),
    ]


SPREAD = "TRL divides by the tokens of the batch, sequence_sum by its responses"


def verl_cases() -> list[Case]:
    published = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    constant = {"aggregation": "constant", "aggregation_tokens": LONGEST}
    return [
        Case("verl", "vanilla", {"clip_ratio_c": 3.0}, {"preset": "grpo-dual-clip"}),
        Case(
            "verl",
            "vanilla, seq-mean-token-sum-norm",
            {"clip_ratio_c": 3.0, "mode": "seq-mean-token-sum-norm"},
            {"preset": "grpo-dual-clip", **constant},
        ),
        Case(
            "verl",
            "vanilla, rollout_is_weights",
            {"clip_ratio_c": 3.0, "correction": True},
            {"preset": "grpo-tis", "boundary": {"dual": 3.0}},
        ),
        Case("verl", "gspo", {**published, "mode": "seq-mean-token-mean"}, {"preset": "gspo-published"}),
        Case(
            "verl",
            "dppo_tv",
            {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
            {"preset": "dppo-tv"},
        ),
        Case(
            "verl",
            "dppo_kl",
            {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
            {"preset": "dppo-kl"},
        ),
        Case("verl", "sapo", {}, {"preset": "sapo"}),
        Case("verl", "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}, {"preset": "cispo"}),
        Case("verl", "gpg", {}, {"preset": "reinforce"}),
        Case(
            "verl",
            "dro",
            {"dro_beta": 0.1},
            {"preset": "reinforce", "log_ratio_coef": 0.05},
            "no preset of its own: REINFORCE with the squared log-ratio at half of beta",
        ),
        Case(
            "verl",
            "bypass_mode, reinforce, token TIS",
            {"bypass": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}},
            {"preset": "tis-pg"},
        ),
        Case(
            "verl",
            "geo_mean",
            {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
            {"preset": "gspo"},
            "GMPO clips each token in log space before the mean; GSPO clips the mean: not the same method",
            agrees=False,
        ),
    ]


# ---- inside the peers' environment ----


@dataclass
class Batch:
    """Right-padded rows, as the peers want them."""

    logp: Any  # [B, W], with gradient
    old: Any  # [B, W], what ratios are taken against
    behavior: Any  # [B, W], the engine, for corrections
    reference: Any  # [B, W]
    advantage: Any  # [B]
    mask: Any  # [B, W] bool


def make_batch(dtype: Any, spread: float) -> Batch:
    """Log-probabilities that drift by `spread`: most tokens inside the usual radii, some far outside."""
    import torch

    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old = -normal(RESPONSES, LONGEST).abs() * 1.5 - 0.02
    drift = spread * normal(RESPONSES, LONGEST) * (1 + 4 * (torch.rand(old.shape, generator=random) < 0.1))
    lengths = torch.randint(3, LONGEST + 1, (RESPONSES,), generator=random)
    mask = torch.arange(LONGEST) < lengths[:, None]
    logp = (old + drift).clamp(max=-1e-4)
    rows = [old, logp, old + 0.3 * normal(*old.shape), old + 0.2 * normal(*old.shape)]
    old, logp, behavior, reference = (row.clamp(max=-1e-4).to(dtype) for row in rows)
    return Batch(logp.requires_grad_(), old, behavior, reference, normal(RESPONSES).to(dtype), mask)


def ours(case: Case, batch: Batch) -> tuple[Any, Any]:
    """Loss and gradient of `policy_loss`, on the rows of the padded batch end to end."""
    import torch

    from steadyrl.method import ObjectiveConfig
    from steadyrl.objective.loss import policy_loss
    from steadyrl.objective.rule import Layout
    from steadyrl.types import BatchCounts

    objective = ObjectiveConfig.model_validate({"kl_coef": 0.0, **case.objective})
    sequence = torch.arange(RESPONSES).repeat_interleave(LONGEST)
    corrected = objective.anchor == "old_actor"
    result = policy_loss(
        objective,
        logp=batch.logp.reshape(-1),
        behavior_logp=(batch.behavior if corrected else batch.old).reshape(-1),
        old_logp=batch.old.reshape(-1) if corrected else None,
        reference_logp=batch.reference.reshape(-1) if objective.kl_coef else None,
        advantage=batch.advantage[sequence],
        layout=Layout(batch.mask.reshape(-1), sequence, RESPONSES),
        counts=BatchCounts(num_tokens=int(batch.mask.sum()), num_sequences=RESPONSES),
    )
    return result.loss, torch.autograd.grad(result.loss, batch.logp)[0]


def theirs_trl(case: Case, batch: Batch) -> tuple[Any, Any]:
    """`GRPOTrainer._compute_loss`, unbound, on a stand-in that has what the loss reads."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    values = case.peer_values
    loss_type = case.loss.split(",")[0]
    fields = GRPOConfig.__dataclass_fields__

    def default(name: str) -> Any:
        return fields[name].default

    args = SimpleNamespace(
        delta=values.get("delta"),
        use_bias_correction_kl=False,
        sapo_temperature_pos=default("sapo_temperature_pos"),
        sapo_temperature_neg=default("sapo_temperature_neg"),
        vespo_k_pos=default("vespo_k_pos"),
        vespo_lambda_pos=default("vespo_lambda_pos"),
        vespo_k_neg=default("vespo_k_neg"),
        vespo_lambda_neg=default("vespo_lambda_neg"),
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logp, torch.zeros_like(batch.old), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=values.get("off_policy"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=values.get("level", "token"),
        beta=values.get("beta", 0.0),
        loss_type=loss_type,
        epsilon_low=values.get("epsilon_low", 0.2),
        epsilon_high=values.get("epsilon_high", 0.2),
        use_vllm=bool(values.get("correction")),
        vllm_importance_sampling_correction=True,
        args=args,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=values.get("max_completion_length", LONGEST),
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantage,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if values.get("correction"):
        inputs["importance_sampling_ratio"] = correction(batch)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, torch.autograd.grad(loss, batch.logp)[0]


def theirs_verl(case: Case, batch: Batch) -> tuple[Any, Any]:
    """A registered policy loss with verl's own configuration."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    values = dict(case.peer_values)
    mode = values.pop("mode", "token-mean")
    weights = correction(batch) if values.pop("correction", False) else None
    policy = {"rollout_correction": values.pop("bypass")} if "bypass" in values else {}
    if "dro_beta" in values:
        policy["dro_beta"] = values.pop("dro_beta")
    config = ActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**policy),
        **values,
    )
    loss, _ = get_policy_loss_fn(case.loss.split(",")[0])(
        old_log_prob=batch.old,
        log_prob=batch.logp,
        advantages=batch.advantage[:, None].expand_as(batch.old),
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    return loss, torch.autograd.grad(loss, batch.logp)[0]


def correction(batch: Batch) -> Any:
    """min(k, 2): the peers compute it elsewhere and hand it to the loss."""
    return (batch.old - batch.behavior).exp().clamp(max=2.0)


def compare(case: Case, dtype: Any, spread: float) -> tuple[float, float]:
    """(largest relative difference of the gradients, factor of the aggregation)."""
    batch = make_batch(dtype, spread)
    _, mine = ours(case, batch)
    run: Callable[[Case, Batch], tuple[Any, Any]] = {"trl": theirs_trl, "verl": theirs_verl}[case.peer]
    _, other = run(case, batch)
    mine, other = mine.double(), other.double()
    factor = float((mine * other).sum() / (other * other).sum())
    return float((mine - factor * other).abs().max() / mine.abs().max()), factor


def inside() -> None:
    """Print the table. Runs in the peers' environment."""
    import torch

    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "trl", "verl", "transformers")}
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"Measured on {today} with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n")
    print("| library | loss | objective | float64 | float32 | factor | note |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    wrong = []
    for case in cases():
        spread = 0.02 if "vespo" in case.loss else 0.12
        exact, factor = compare(case, torch.float64, spread)
        single, _ = compare(case, torch.float32, spread)
        if (exact < 1e-6) != case.agrees:
            wrong.append(case.loss)
        print(
            f"| {case.peer} | {case.loss} | {describe(case)} | {exact:.1e} | {single:.1e} "
            f"| {factor:.6g} | {case.note} |"
        )
    if wrong:
        raise SystemExit(f"not as expected: {', '.join(wrong)}")


def describe(case: Case) -> str:
    changes = [f"{name}={value}" for name, value in case.objective.items() if name not in ("preset", "boundary")]
    return " ".join([f"`{case.objective['preset']}`", *changes])


# ---- outside ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="the interpreter of the environment with trl and verl")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside()
        return
    if options.python is None:
        parser.error("--python is needed; the head of this file says how to make the environment")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    command = [str(options.python), __file__, "--inside"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Measured on")), 0)
    table = "\n".join(lines[start:]) + "\n"
    print(table, end="")
    if options.out is not None and done.returncode == 0:
        options.out.write_text(HEAD + table, encoding="utf-8")
    sys.exit(done.returncode)


HEAD = """# Gradients of other libraries' losses against ours

Written by `benchmarks/peers.py`: the same random log-probabilities (32 responses of 3 to 48 tokens, a tenth of the
tokens drifted far), the peer's own function, and `policy_loss`. The columns float64 and float32 hold the largest
difference between the two gradients over the largest entry of ours, after scaling the peer's by one factor, the
column `factor`. A factor of 1 means that the aggregation agrees, too. The last row is a control: two different methods.

Not compared: verl's `clip_cov` and `kl_cov` draw tokens at random, and there is no such rule here; SAT, because no
other library has it.

"""

if __name__ == "__main__":
    main()
