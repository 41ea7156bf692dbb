"""The whole algorithm in one file, for reading: reinforcement learning with a Staleness-Adaptive Trust Region.

A tiny mixture-of-experts language model learns to add: "3+8+2+4+1=" is to be answered by the running sums
"11,13,17,18". Each step samples a group of responses to every problem, grades them 0 or 1, compares each response
with its group, and takes one optimizer step on the SAT-GSPO loss. Nothing runs in parallel here. What asynchronous
training does to the data is imitated by one number, STALE: the sampler gets new weights only every STALE steps. Then
d_bar and q grow with the age of the weights. The gated share stays at most 1 - ALPHA: q moves with the batch.

    python examples/one_file_loop.py              synchronous, under a minute on one core
    python examples/one_file_loop.py --stale 8    the same with weights that are up to 7 steps old

Equation numbers are those of "Stale but Stable: Staleness-Adaptive Trust Regions for Stabilizing Asynchronous
Reinforcement Learning" (arXiv 2607.18722). Only the folder of the bundled model comes from steadyrl.

Letters in shapes: B responses of a batch, P tokens of a prompt, n tokens of the longest response, V vocabulary.
"""

import argparse
import hashlib
import importlib.resources
import math
import random
import re
import time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

STEPS = 40  # optimizer steps
STALE = 1  # optimizer steps between two copies of the weights to the sampler; 1 = synchronous
PROMPTS = 32  # problems per step
GROUP = 8  # responses per problem
TERMS, MAX_TERM = 5, 9  # "3+8+2+4+1=": all prompts have the same number of tokens, so none needs padding
MAX_RESPONSE = 24  # tokens; a full answer has at most 12
LEARNING_RATE = 3e-4
EPS_LOW, EPS_HIGH = 0.2, 0.2  # radii of the trust region before SAT contracts them
ALPHA = 0.90  # SAT leaves this share of the tokens alone: those that drifted least
TEST_PROBLEMS, TEST_SAMPLES = 128, 4
SEED = 0


def sat_gspo_loss(
    logp: Tensor, behavior_logp: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """SAT-GSPO on a batch of whole responses.

    Args:
        logp: [B, n], log pi of each sampled token under the policy being trained; the only input with a gradient.
        behavior_logp: [B, n], log mu of it, as the sampler recorded it. It holds whatever makes the two differ:
            weights that moved on, and the numerics of the sampler.
        advantage: [B].
        mask: [B, n] bool, true on sampled tokens, false on the padding after them.

    Returns:
        The loss, and what there is to see: d_bar, q, gated, removed.
    """
    # Eq. 1: the log-ratio of each token. Masked before anything is summed or exponentiated. [B, n]
    d = torch.where(mask, logp - behavior_logp, 0.0)

    # Eq. 20: the ratio of a response is the geometric mean of its token ratios; it stands in for r on all its tokens.
    log_rho = d.sum(dim=1) / mask.sum(dim=1)  # [B]
    rho = log_rho.exp()  # [B]

    # Eq. 13: everything that steers the trust region is a constant to the gradient.
    d_sg = log_rho.detach()  # [B]

    # Eq. 14: q is the smallest value that at least ALPHA of the active tokens do not exceed, so the k-th smallest.
    # Nothing is interpolated. Each response counts once per token: longer responses weigh more.
    score = d_sg.abs().unsqueeze(1).expand_as(mask)[mask]  # [active tokens]
    k = math.ceil(round(ALPHA * score.numel(), 6))  # rounded first: 0.9 * N may land just above a whole number
    q = score.kthvalue(k).values  # []

    # Eq. 15: the Hill kernel. Its two arguments are the drift upwards and the drift downwards.
    def psi(u: Tensor) -> Tensor:
        return 1 / (1 + (u / q) ** 2)

    # Eq. 16: strictly beyond q the side of the drift contracts, by 1/2 or more. The sign of A plays no part.
    gate = (q > 0) & (d_sg.abs() > q)  # [B] bool; q = 0 turns it off
    c_high = torch.where(gate, psi(d_sg.clamp(min=0)), 1.0)  # [B]; psi(0) = 1 leaves the other side as it is
    c_low = torch.where(gate, psi((-d_sg).clamp(min=0)), 1.0)  # [B]

    # Eq. 17: the radii of each response.
    low, high = EPS_LOW * c_low, EPS_HIGH * c_high  # [B]

    # Eq. 18-19: the pessimistic surrogate of PPO on the contracted interval. Outside it the minimum picks the constant
    # if the advantage pushes further out, so that gradient is removed; one that pulls back is kept.
    clipped = rho.clamp(1 - low, 1 + high)  # [B]
    surrogate = torch.minimum(rho * advantage, clipped * advantage)  # [B]

    # GSPO weighs all responses alike. The paper adds 1e-3 times a KL penalty to the starting weights, left out here.
    loss = -surrogate.mean()

    removed = ((rho > 1 + high) & (advantage > 0)) | ((rho < 1 - low) & (advantage < 0))  # [B] bool
    lengths = mask.sum(dim=1)  # [B]; rates are over tokens, as the quantile is
    return loss, {
        "d_bar": float(d.detach().abs().sum() / lengths.sum()),  # mean |d| over the tokens, whatever the unit
        "q": float(q),
        "gated": float((gate * lengths).sum() / lengths.sum()),
        "removed": float((removed * lengths).sum() / lengths.sum()),
    }


def group_advantage(rewards: Tensor) -> Tensor:
    """Rewards [problems, GROUP] -> how much better each response is than its group, [problems * GROUP]."""
    spread = rewards.std(dim=1, keepdim=True)
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-6)).flatten()


def draw_problems(generator: random.Random, size: int, held_out: bool) -> list[list[int]]:
    """Training or test problems: a hash holds one in ten out, and the bundled model never saw those either."""
    problems: list[list[int]] = []
    while len(problems) < size:
        terms = [generator.randint(1, MAX_TERM) for _ in range(TERMS)]
        digest = hashlib.blake2s(question(terms).encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "big") % 10 == 0) == held_out:
            problems.append(terms)
    return problems


def question(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def grade(terms: list[int], response: str, finished: bool) -> float:
    """1 if what follows the last comma is the sum, else 0. A response that never ended is wrong."""
    final = response.rsplit(",", 1)[-1]
    return float(finished and re.fullmatch("[0-9]+", final) is not None and int(final) == sum(terms))


@torch.no_grad()
def sample(
    sampler: PreTrainedModel, prompt_ids: Tensor, end_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one response to each prompt at temperature 1, token by token with a KV cache.

    `sampler` is the policy mu, in bfloat16 as a rollout engine would run it; `prompt_ids` is [B, P]. Returns response
    tokens, their log-probabilities in float32, and the mask of what was really sampled; all [B, n].
    """
    cache = DynamicCache()
    alive = torch.ones(len(prompt_ids), dtype=torch.bool)  # [B], has not met the end token yet
    tokens, logps, masks = [], [], []
    inputs = prompt_ids  # [B, P] at first, then the last token alone, [B, 1]
    while alive.any() and len(tokens) < MAX_RESPONSE:
        logits = sampler(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # [B, V]
        distribution = torch.log_softmax(logits.float(), dim=-1)  # [B, V]; what is recorded is what was sampled from
        token = torch.multinomial(distribution.exp(), 1, generator=generator)  # [B, 1]
        tokens.append(token)
        logps.append(distribution.gather(1, token))
        masks.append(alive.unsqueeze(1))
        alive = alive & (token.squeeze(1) != end_id)  # the end token itself is part of the response
        inputs = token
    return torch.cat(tokens, dim=1), torch.cat(logps, dim=1), torch.cat(masks, dim=1)


def response_logp(policy: PreTrainedModel, prompt_ids: Tensor, response_ids: Tensor) -> Tensor:
    """log pi of each response token, [B, n], in one pass over prompt and response.

    Tokens after the end need no attention mask: no earlier token looks at them, and the loss masks them.
    """
    logits = policy(input_ids=torch.cat([prompt_ids, response_ids], dim=1), use_cache=False).logits  # [B, P + n, V]
    # the logits at a position are about the token after it
    distribution = torch.log_softmax(logits[:, prompt_ids.shape[1] - 1 : -1].float(), dim=-1)  # [B, n, V]
    return distribution.gather(2, response_ids.unsqueeze(2)).squeeze(2)


def rollout(
    sampler: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[list[int]],
    group: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample and grade a group of responses to each problem.

    Returns prompts [B, P]; response tokens, their log-probabilities and mask [B, n]; rewards [problems, group].
    """
    repeated = [terms for terms in problems for _ in range(group)]  # a group is contiguous
    prompt_ids = torch.tensor([tokenizer.encode(question(terms)) for terms in repeated])
    end_id = sampler.config.eos_token_id
    response_ids, logp, mask = sample(sampler, prompt_ids, end_id, generator)
    rewards = []
    for terms, ids, active in zip(repeated, response_ids, mask, strict=True):
        text = str(tokenizer.decode(ids[active], skip_special_tokens=True))
        rewards.append(grade(terms, text, finished=bool(ids[active][-1] == end_id)))
    return prompt_ids, response_ids, logp, mask, torch.tensor(rewards).view(-1, group)


@torch.no_grad()
def copy_weights(policy: PreTrainedModel, sampler: PreTrainedModel) -> None:
    """The broadcast: float32 weights of the trainer, rounded into the sampler's bfloat16."""
    for source, target in zip(policy.parameters(), sampler.parameters(), strict=True):
        target.copy_(source)


def main(steps: int, stale: int) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # of loading
    start = time.perf_counter()
    numbers, noise = random.Random(SEED), torch.Generator().manual_seed(SEED)
    folder = str(importlib.resources.files("steadyrl") / "assets" / "tiny_moe")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load = {"experts_implementation": "eager"}  # the fastest on a CPU
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **load).eval()
    sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **load).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    test = draw_problems(random.Random("test"), TEST_PROBLEMS, held_out=True)

    def accuracy() -> float:
        copy_weights(policy, sampler)
        return float(rollout(sampler, tokenizer, test, TEST_SAMPLES, torch.Generator().manual_seed(1))[-1].mean())

    before, recent = accuracy(), []
    for step in range(steps):
        age = step % stale  # optimizer steps that the sampler's weights are behind
        if age == 0:
            copy_weights(policy, sampler)
        problems = draw_problems(numbers, PROMPTS, held_out=False)
        prompt_ids, response_ids, behavior_logp, mask, rewards = rollout(sampler, tokenizer, problems, GROUP, noise)

        logp = response_logp(policy, prompt_ids, response_ids)
        loss, seen = sat_gspo_loss(logp, behavior_logp, group_advantage(rewards), mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()

        recent.append(float(rewards.mean()))
        if step % 3 == 0 or step == steps - 1:  # every third step comes by every age when STALE is 8
            print(
                f"step {step + 1:3d}  age {age}  reward {sum(recent) / len(recent):.3f}  d_bar {seen['d_bar']:.4f}  "
                f"q {seen['q']:.5f}  gated {seen['gated']:.3f}  removed {seen['removed']:.3f}",
                flush=True,
            )
            recent.clear()
    after = accuracy()
    print(f"held-out accuracy {before:.3f} -> {after:.3f} after {steps} steps, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Synchronous SAT-GSPO on running sums, in one file.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument("--stale", type=int, default=STALE, help="optimizer steps between two copies to the sampler")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.stale)
