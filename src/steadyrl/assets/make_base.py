"""How `tiny_moe` was made: a supervised warm-up on noisy traces, from a seed.

Real base models can often solve a task when sampled many times and seldom when sampled once: that is
what RL sharpens. A partial sum in a training trace is off by 1 to 3 with probability `NOISE` and the
trace goes on from there, so the model learns the procedure together with its mistakes.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from steadyrl.models.load import save_model
from steadyrl.models.logprobs import token_logp
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.arithmetic import question, split_of

NOISE = 0.2  # probability that a partial sum of a warm-up trace is wrong
STEPS = 500
TRACES_PER_STEP = 192
PEAK_LR = 4e-3
VOCABULARY = 128  # of the embedding; the tokenizer uses a little less
IGNORED = -100  # marks targets without a loss


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; a prompt starts with <bos>."""
    specials = ["<pad>", "<bos>", "<eos>"]
    characters = sorted(set(string.printable) - set(string.whitespace) | {" ", "\n"})
    tokens = {token: index for index, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokens["<bos>"])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that serving engines take
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    specials = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **specials))


def make_base(
    folder: Path, seed: int = 0, steps: int = STEPS, progress: Callable[[int, int, float], None] = lambda *_: None
) -> None:
    """Write the checkpoint; the same seed gives the same bytes on the same build of torch.

    `progress` is called with (step, steps, loss) after each of the optimizer steps.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.1)
    for step, (inputs, targets) in zip(range(steps), _batches(tokenizer, random.Random(seed)), strict=False):
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        has_loss = targets != IGNORED
        logp = token_logp(logits[has_loss], targets[has_loss], temperature=1.0)
        loss = -logp.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step + 1, steps, float(loss.detach()))
    save_model(model, tokenizer, folder)


def _batches(tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and next-token targets [TRACES_PER_STEP, W]; the question and the padding have no loss."""
    task = ArithmeticTask()
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    while True:
        rows = []
        for _ in range(TRACES_PER_STEP):
            prompt, answer = _noisy_trace(task, generator)
            prompt_ids = tokenizer(prompt).input_ids
            answer_ids = [*tokenizer(answer, add_special_tokens=False).input_ids, eos]
            rows.append((prompt_ids + answer_ids, len(prompt_ids)))
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
        targets = ids.clone()
        for row, (token_ids, prompt_length) in enumerate(rows):
            targets[row, :prompt_length] = IGNORED
            targets[row, len(token_ids) :] = IGNORED
        yield ids[:, :-1], targets[:, 1:]


def _noisy_trace(task: ArithmeticTask, generator: random.Random) -> tuple[str, str]:
    """A training problem and an answer whose every step may be wrong."""
    while True:
        terms = [generator.randint(1, task.max_term) for _ in range(task.terms)]
        if split_of(terms) == "train":
            break
    total, shown = terms[0], []
    for term in terms[1:]:
        total += term
        if generator.random() < NOISE:
            total = max(0, total + generator.choice([-3, -2, -1, 1, 2, 3]))
        shown.append(str(total))
    return question(terms), ",".join(shown)
