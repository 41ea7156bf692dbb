"""Objectives by name: each entry is the `[objective]` table of a recipe; what it leaves out has its default.

Ratios are taken against the engine (`anchor = "rollout"`) unless an entry says otherwise. A correction needs a
policy between engine and trainer, so those entries take the weights that sampled (`anchor = "old_actor"`): the
ratio holds the policy's lag, the weight holds what the engine adds. Numbers in parentheses are arXiv numbers;
"our variant" marks what the source leaves open. `docs/objectives.md` has the formulas.
"""

from typing import Any

Preset = dict[str, Any]

CLIP: Preset = {"rule": "clip", "low": 0.2, "high": 0.2}
SAT: Preset = {"rule": "sat", "low": 0.2, "high": 0.2, "alpha": 0.9, "exponent": 2.0}
DPPO_TV: Preset = {"rule": "dppo", "divergence": "tv", "low": 0.15, "high": 0.15, "cap": 20.0}
DPPO_KL: Preset = {"rule": "dppo", "divergence": "kl", "low": 0.05, "high": 0.05, "cap": 20.0}
TIS: Preset = {"kind": "tis", "level": "token", "cap": 2.0}

GRPO: Preset = {"unit": "token", "boundary": CLIP, "aggregation": "token_mean"}
GSPO: Preset = {"unit": "sequence", "boundary": CLIP, "aggregation": "sequence_mean"}
SAT_GRPO: Preset = {"unit": "token", "boundary": SAT, "aggregation": "token_mean"}
SAT_GSPO: Preset = {"unit": "sequence", "boundary": SAT, "aggregation": "sequence_mean"}

PRESETS: dict[str, Preset] = {
    # ---- the clip of PPO ----
    # GRPO (2402.03300) with the radii of the staleness study
    "grpo": GRPO,
    # + dual clip (1912.09729) at c = 3, verl's default
    "grpo-dual-clip": {**GRPO, "boundary": {**CLIP, "dual": 3.0}},
    # PPO on the product ratio of the response: our variant of the sequence as one action
    "grpo-product": {"unit": "product", "boundary": CLIP, "aggregation": "sequence_mean"},
    # DAPO (2503.14476): clip-higher, token mean, no KL
    "dapo": {**GRPO, "boundary": {**CLIP, "high": 0.28}, "kl_coef": 0.0},
    # Dr. GRPO (2503.20783): no std, a constant in place of the length; set it to sampling.max_response_tokens
    "dr-grpo": {
        **GRPO,
        "aggregation": "constant",
        "aggregation_tokens": 32,
        "advantage": "group_centered",
        "kl_coef": 0.0,
    },
    # GSPO (2507.18071) with the radii of the staleness study
    "gspo": GSPO,
    # GSPO with its published radii
    "gspo-published": {**GSPO, "boundary": {**CLIP, "low": 3e-4, "high": 4e-4}},
    # GSPO-token (2507.18071, Sec. 4.3): the value of GSPO, a gradient for each token
    "gspo-token": {**GSPO, "unit": "sequence_token"},
    # ---- the staleness-adaptive trust region (2607.18722) ----
    "sat-grpo": SAT_GRPO,
    "sat-gspo": SAT_GSPO,
    # the quantile over the micro-batch, as the paper words it: depends on how the batch is cut
    "sat-grpo-microbatch": {**SAT_GRPO, "boundary": {**SAT, "quantile_scope": "microbatch"}},
    # a moving average of the quantile: our variant
    "sat-grpo-ema": {**SAT_GRPO, "boundary": {**SAT, "quantile_scope": "ema"}},
    # a quantile for each lag, so that old tokens are compared with old ones: our variant
    "sat-grpo-lag": {**SAT_GRPO, "boundary": {**SAT, "quantile_scope": "lag"}},
    "sat-gspo-lag": {**SAT_GSPO, "boundary": {**SAT, "quantile_scope": "lag"}},
    # every response counts once in the quantile, whatever its length: our variant
    "sat-gspo-response": {**SAT_GSPO, "boundary": {**SAT, "quantile_weight": "response"}},
    # ---- other kernels of SAT: our variants, for ablations; the paper has Hill alone ----
    "sat-grpo-exp": {**SAT_GRPO, "boundary": {**SAT, "kernel": "exp"}},
    "sat-grpo-exp-continuous": {**SAT_GRPO, "boundary": {**SAT, "kernel": "exp_continuous"}},
    "sat-grpo-gauss": {**SAT_GRPO, "boundary": {**SAT, "kernel": "gauss"}},
    "sat-grpo-power": {**SAT_GRPO, "boundary": {**SAT, "kernel": "power"}},
    "sat-grpo-shifted-hill": {**SAT_GRPO, "boundary": {**SAT, "kernel": "shifted_hill"}},
    "sat-grpo-const": {**SAT_GRPO, "boundary": {**SAT, "kernel": "const", "strength": 0.5}},
    "sat-grpo-zero": {**SAT_GRPO, "boundary": {**SAT, "kernel": "zero"}},
    # ---- hard masks ----
    # DPPO (2602.04879) with the thresholds of its scripts; they divide by a constant, this takes the token mean
    "dppo-tv": {**GRPO, "boundary": DPPO_TV},
    "dppo-kl": {**GRPO, "boundary": DPPO_KL},
    "dppo-topk-tv": {**GRPO, "boundary": {**DPPO_TV, "divergence": "topk_tv"}},
    "dppo-topk-kl": {**GRPO, "boundary": {**DPPO_KL, "divergence": "topk_kl"}},
    # the DPPO baseline of the SAT paper (2607.18722, App. F): 150 times tighter, and times the clip
    "dppo-sat-paper": {**GRPO, "boundary": {**DPPO_TV, "low": 1e-3, "high": 1e-3, "clip": 0.2}},
    # DIS, double-sided masking of SAO (2607.07508), the numbers for reasoning with tools
    "dis": {**GRPO, "boundary": {"rule": "band", "low": 0.3, "high": 5.0}},
    # IPO (prime-rl): a two-sided mask, and 1e-3 (log r)^2
    "ipo": {**GRPO, "boundary": {"rule": "ipo", "threshold": 0.1}, "log_ratio_coef": 1e-3},
    # KPop (prime-rl; 2607.18722, App. E)
    "kpop": {**GRPO, "boundary": {"rule": "kpop", "phi": 0.1}},
    # M2PO (2510.01161): a budget for the second moment, over the whole batch
    "m2po": {**GRPO, "boundary": {"rule": "m2po", "budget": 0.04}},
    # VACO's mask (2603.01365): our variant of the bound
    "vaco": {**GRPO, "boundary": {"rule": "vaco", "bound": 0.2}},
    # a gate on the exact D_TV of each state, after TRPO (1502.05477): our variant
    "trpo": {**GRPO, "boundary": {"rule": "trpo", "delta": 0.1}},
    # ---- soft boundaries ----
    # SPO (2401.16025; 2607.18722, Eq. 48)
    "spo": {**GRPO, "boundary": {"rule": "spo", "eps": 0.2}},
    # DRPO (2606.09821; 2607.18722, Eq. 49); delta is ours
    "drpo": {**GRPO, "boundary": {"rule": "drpo", "delta": 0.15}},
    # SAPO (2511.20347)
    "sapo": {
        "unit": "token",
        "boundary": {"rule": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
        "aggregation": "sequence_mean",
    },
    # CISPO (2506.13585): weights up to 5, no lower bound
    "cispo": {**GRPO, "boundary": {"rule": "cispo", "low": 1.0, "high": 4.0}},
    # VESPO (2602.10693), the numbers of its code
    "vespo": {"unit": "product", "boundary": {"rule": "vespo"}, "aggregation": "sequence_mean"},
    # unbounded positive (2607.06987)
    "up": {**GRPO, "boundary": {"rule": "unbounded_positive", "low": 0.2, "high": 0.2}},
    # TOPR (2503.14286): our variant of the unit and the truncation
    "topr": {**GRPO, "boundary": {"rule": "topr"}},
    # ---- no boundary ----
    # the policy gradient: without a weight (REINFORCE), with r, with min(r, 2) (2607.18722, Eq. 41)
    "reinforce": {**GRPO, "boundary": {"rule": "importance", "weighted": False}},
    "pg-is": {**GRPO, "boundary": {"rule": "importance"}},
    "tis-pg": {**GRPO, "boundary": {"rule": "importance", "cap": 2.0}},
    # ---- corrections for the engine ----
    # truncated importance sampling as a multiplier (Yao et al. 2025), by token
    "grpo-tis": {**GRPO, "anchor": "old_actor", "correction": TIS},
    "gspo-tis": {**GSPO, "anchor": "old_actor", "correction": TIS},
    "sat-grpo-tis": {**SAT_GRPO, "anchor": "old_actor", "correction": TIS},
    "sat-gspo-tis": {**SAT_GSPO, "anchor": "old_actor", "correction": TIS},
    # the same with the product over the response
    "grpo-seq-tis": {**GRPO, "anchor": "old_actor", "correction": {**TIS, "level": "sequence"}},
    # IcePop (2510.18855)
    "icepop": {**GRPO, "anchor": "old_actor", "correction": {"kind": "icepop", "low": 0.5, "high": 5.0}},
    # masked importance sampling: the product, or nothing (verl, slime)
    "mis": {**GRPO, "anchor": "old_actor", "correction": {"kind": "mis", "low": 0.5, "high": 2.0}},
    # decoupled PPO (2505.24298). Published with anchor = "step_start", which needs several steps per batch
    "decoupled-ppo": {**GRPO, "anchor": "old_actor", "correction": {"kind": "decoupled"}},
    # A-3PO (2512.06547): the policy in between is interpolated by age
    "a3po": {**GRPO, "anchor": "prox_approx", "correction": {"kind": "decoupled"}},
    # ---- rejection of responses ----
    # geometric rejection of responses that the engine saw differently (verl, slime)
    "geo-rs": {
        **GRPO,
        "anchor": "old_actor",
        "reject": [{"kind": "geometric", "of": "mismatch", "low": 0.999, "high": 1.001}],
    },
    # the same by the mean of k3 (verl)
    "k3-rs": {**GRPO, "anchor": "old_actor", "reject": [{"kind": "k3", "of": "mismatch", "limit": 1e-2}]},
    # SeqClip (2607.18722, Eq. 39)
    "seqclip": {**GSPO, "reject": [{"kind": "geometric", "of": "policy", "low": 0.995, "high": 1.005}]},
    # off-policy sequence masking (2512.02556); calibrate delta at lag 0
    "opsm": {**GRPO, "reject": [{"kind": "off_policy", "delta": 0.1}]},
    # Trust Region Masking (2512.23075) with sampled proxies: our variant; calibrate the limits at lag 0
    "trm": {**GRPO, "reject": [{"kind": "trust_region", "max_k2": 0.5, "mean_k3": 1e-2}]},
    # mu-GRPO (2605.17570): a wide clip and a veto on what follows a drifted token where A < 0; our variant
    "mu-grpo": {
        **GRPO,
        "boundary": {**CLIP, "low": 0.8, "high": 1.0},
        "reject": [{"kind": "negative_veto", "eps": 0.5}],
    },
}
