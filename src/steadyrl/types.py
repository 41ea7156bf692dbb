"""The types that cross a border between two parts of the system.

Shape letters, the same in every file:

    T tokens in a micro-batch    S sequences in it    n tokens of one rollout    G rollouts per prompt
    V vocabulary                 L MoE layers         E experts                  K experts per token

Three policies, never called "old": `logp` is the policy being trained (it carries the gradient),
`anchor_logp` the policy that ratios are taken against, `behavior_logp` the engine that sampled.

*version* = optimizer steps completed by a set of weights. *lag* = the learner's version when a token
is trained on, minus the version that sampled it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch import device as Device

# stop: an end token or a stop string. length: the limit of tokens. canceled: ended from outside, keeping its tokens.
# too_long: the prompt left no room for a response, and long prompts are dropped. error: the engine failed on it.
Finish = Literal["stop", "length", "canceled", "too_long", "error"]
LongPrompts = Literal["refuse", "drop"]
Status = Literal["right", "wrong", "unparsable", "truncated", "timeout", "error"]


@dataclass(frozen=True)
class Prompt:
    """One problem, already rendered to token ids."""

    prompt_id: str
    token_ids: NDArray[np.int32]  # [p]
    text: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Consumed:
    """What the trainer said about a rollout in the optimizer step that trained on it."""

    version: int  # of the policy before that step
    advantage: float
    trainer_logp: NDArray[np.float32]  # [n] under the policy being trained, 0 where not sampled
    old_logp: NDArray[np.float32] | None  # [n] under the old_actor or step_start anchor, where there is one


@dataclass
class Rollout:
    """One sampled response. The engine fills everything but `reward`, `status` and `consumed`.

    `loss_mask` is true on the tokens that the policy sampled, and nowhere else. `behavior_logp` and
    `versions` are 0 and -1 where it is false. `routed_experts[i]` are the experts that input token i
    went through; the last token never entered the model, so there are n - 1 rows.
    """

    prompt_id: str
    group: int  # which prompt of the batch
    token_ids: NDArray[np.int32]  # [n] prompt and response
    loss_mask: NDArray[np.bool_]  # [n]
    behavior_logp: NDArray[np.float32]  # [n]
    versions: NDArray[np.int32]  # [n]
    routed_experts: NDArray[Any] | None  # [n-1, L, K] uint8 or uint16
    finish: Finish
    text: str  # of the response
    reward: float = float("nan")
    status: Status = "error"
    # the K likeliest tokens at every sampled position, where an objective needs distributions
    top_ids: NDArray[np.int32] | None = None  # [n, K], 0 where not sampled
    top_logp: NDArray[np.float32] | None = None  # [n, K], -inf where not sampled
    prompt_text: str = ""
    consumed: Consumed | None = None
    # the tokens that top-p or top-k left to draw from at every sampled position, one set after the other
    support_ids: NDArray[Any] | None = None  # [sum of lengths] uint16 or int32
    support_lengths: NDArray[np.int32] | None = None  # [n], 0 where not sampled
    finished_version: int = -1  # of the engine when the response ended; -1 = that of its newest token

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "behavior_logp", "versions"):
            length = len(getattr(self, name))
            if length != n:
                raise ValueError(f"rollout of {self.prompt_id}: {name} has {length} entries for {n} tokens")
        if self.routed_experts is not None and len(self.routed_experts) != n - 1:
            raise ValueError(
                f"rollout of {self.prompt_id}: {len(self.routed_experts)} rows of routed experts for {n} tokens; "
                f"one row per input token, {n - 1}, is needed"
            )
        for name in ("top_ids", "top_logp", "support_lengths"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != n:
                raise ValueError(f"rollout of {self.prompt_id}: {name} has {len(rows)} rows for {n} tokens")
        if (self.support_ids is None) != (self.support_lengths is None):
            raise ValueError(f"rollout of {self.prompt_id}: support_ids and support_lengths come together")
        named = 0 if self.support_lengths is None else int(self.support_lengths.sum())
        if self.support_ids is not None and len(self.support_ids) != named:
            raise ValueError(f"rollout of {self.prompt_id}: {len(self.support_ids)} support ids for sets of {named}")

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def version(self) -> int:
        """The oldest version that sampled one of its tokens."""
        return int(self.versions[self.loss_mask].min())

    @property
    def is_trainable(self) -> bool:
        """False where the engine gave something that no loss may see, such as a NaN log-probability."""
        logp = self.behavior_logp[self.loss_mask]
        return self.finish != "error" and len(logp) > 0 and bool(np.isfinite(logp).all() and (logp <= 0).all())

    def to_json(self, *, with_likeliest: bool = False) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into the same rollout, to the last bit.

        Without `with_likeliest` the likeliest tokens at every position are left out: they may be a whole vocabulary.
        """
        experts, consumed = self.routed_experts, self.consumed
        old_logp = consumed.old_logp if consumed else None
        return {
            "prompt_id": self.prompt_id,
            "group": self.group,
            "token_ids": self.token_ids.tolist(),
            "loss_mask": self.loss_mask.astype(int).tolist(),
            "behavior_logp": self.behavior_logp.tolist(),
            "versions": self.versions.tolist(),
            "routed_experts": _array_to_json(experts),
            "support_ids": _array_to_json(self.support_ids),
            "support_lengths": None if self.support_lengths is None else self.support_lengths.tolist(),
            "finish": self.finish,
            "finished_version": self.finished_version,
            "prompt_text": self.prompt_text,
            "text": self.text,
            "reward": self.reward,
            "status": self.status,
            "train_version": consumed.version if consumed else None,
            "advantage": consumed.advantage if consumed else None,
            "trainer_logp": consumed.trainer_logp.tolist() if consumed else None,
            "old_logp": None if old_logp is None else old_logp.tolist(),
            "top_ids": _array_to_json(self.top_ids if with_likeliest else None),
            "top_logp": _array_to_json(self.top_logp if with_likeliest else None),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rollout:
        support_lengths, old_logp = data.get("support_lengths"), data.get("old_logp")
        return cls(
            prompt_id=data["prompt_id"],
            group=data["group"],
            token_ids=np.asarray(data["token_ids"], np.int32),
            loss_mask=np.asarray(data["loss_mask"], bool),
            behavior_logp=np.asarray(data["behavior_logp"], np.float32),
            versions=np.asarray(data["versions"], np.int32),
            routed_experts=_array_from_json(data["routed_experts"]),
            finish=data["finish"],
            text=data["text"],
            reward=float("nan") if data["reward"] is None else data["reward"],  # JSON has no NaN
            status=data["status"],
            prompt_text=data["prompt_text"],
            consumed=None
            if data.get("train_version") is None
            else Consumed(
                version=data["train_version"],
                advantage=data["advantage"],
                trainer_logp=np.asarray(data["trainer_logp"], np.float32),
                old_logp=None if old_logp is None else np.asarray(old_logp, np.float32),
            ),
            top_ids=_array_from_json(data.get("top_ids")),
            top_logp=_array_from_json(data.get("top_logp")),
            finished_version=data.get("finished_version", -1),
            support_ids=_array_from_json(data.get("support_ids")),
            support_lengths=None if support_lengths is None else np.asarray(support_lengths, np.int32),
        )


def _array_to_json(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
    }


def _array_from_json(data: dict[str, Any] | None) -> NDArray[Any] | None:
    if data is None:
        return None
    return np.frombuffer(base64.b64decode(data["base64"]), data["dtype"]).reshape(data["shape"])


@dataclass(frozen=True)
class GenerationRequest:
    """What an engine is asked for: `samples_per_prompt` responses to each prompt, in order.

    Two engines that get the same request and the same weights draw the same random numbers.
    """

    prompts: list[Prompt]
    samples_per_prompt: int
    max_response_tokens: int
    temperature: float
    seed: int
    first: int = 0  # position of the first prompt in the stream that the seed is for: each has its own random numbers
    top_logprobs: int = 0  # how many of the likeliest tokens to report with each sampled one
    top_p: float = 1.0  # draw from the smallest set of likeliest tokens with at least this mass; 1 = from all
    top_k: int = 0  # draw from so many of the likeliest tokens; 0 = from all
    stop: tuple[str, ...] = ()  # strings that end a response, which keeps them
    min_response_tokens: int = 0  # no end before; such log-probabilities are not those that a trainer computes
    long_prompts: LongPrompts = "refuse"  # what to do with a prompt that leaves no room for its response


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one batch, G per prompt, a group's rollouts next to each other."""

    batch_id: int
    samples_per_prompt: int  # G
    rollouts: list[Rollout]

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1 or len(self.rollouts) % self.samples_per_prompt:
            raise ValueError(f"{len(self.rollouts)} rollouts do not form groups of {self.samples_per_prompt}")
        for start in range(0, len(self.rollouts), self.samples_per_prompt):
            group = self.rollouts[start : start + self.samples_per_prompt]
            if len({rollout.prompt_id for rollout in group}) != 1:
                raise ValueError(f"rollouts {start} to {start + len(group) - 1} answer different prompts")

    def groups(self) -> list[list[Rollout]]:
        size = self.samples_per_prompt
        return [self.rollouts[i : i + size] for i in range(0, len(self.rollouts), size)]


@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch: S right-padded rows of width W, shifted once.

    Every [S, W] field at position t speaks about `target_ids[:, t]`, the token that follows
    `input_ids[:, t]`. `loss_mask` is false on prompts and padding.
    """

    input_ids: Tensor  # [S, W] int64
    attention_mask: Tensor  # [S, W] int64
    target_ids: Tensor  # [S, W] int64
    loss_mask: Tensor  # [S, W] bool
    behavior_logp: Tensor  # [S, W] float32
    versions: Tensor  # [S, W] int64, -1 where not sampled
    advantage: Tensor  # [S] float32
    routed_experts: Tensor | None  # [S, W, L, K] int64, -1 on padding
    rollout_ids: list[str]  # [S] names for error messages
    sources: list[int]  # [S] which of the rollouts that were packed
    top_ids: Tensor | None = None  # [S, W, K] int64
    top_logp: Tensor | None = None  # [S, W, K] float32
    support_ids: list[Tensor] | None = None  # [S], each [sum of its row of support_lengths] int64
    support_lengths: Tensor | None = None  # [S, W] int64, 0 where not sampled

    def rows(self, start: int, stop: int) -> TrainBatch:
        """The same micro-batch cut down to some of its sequences."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        cut: dict[str, Any] = {name: None if value is None else value[start:stop] for name, value in fields.items()}
        return TrainBatch(**cut)

    def blank(self) -> TrainBatch:
        """One position with the same fields as this micro-batch, and no rollout: nothing is learned from it.

        For a rank that has no work while others do, because all of them have to run the model equally often.
        """
        one = self.rows(0, 1)
        first: dict[str, Any] = {name: getattr(one, name) for name in one.__dataclass_fields__}
        for name, value in first.items():
            if isinstance(value, Tensor) and value.dim() > 1:
                first[name] = value[:, :1]
        first |= {"loss_mask": one.loss_mask.new_zeros(1, 1), "versions": one.versions.new_full((1, 1), -1)}
        first |= {"rollout_ids": [], "sources": []}
        if one.routed_experts is not None:
            first["routed_experts"] = first["routed_experts"].new_full(first["routed_experts"].shape, -1)
        if one.support_ids is not None and one.support_lengths is not None:
            first["support_ids"] = [one.support_ids[0][:0]]
            first["support_lengths"] = one.support_lengths.new_zeros(1, 1)
        return TrainBatch(**first)

    def to(self, device: Device) -> TrainBatch:
        """The same micro-batch on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            return [moved(item) for item in value] if isinstance(value, list) else value

        return TrainBatch(**{name: moved(getattr(self, name)) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class BatchCounts:
    """Sizes of the whole optimizer batch, whatever micro-batch or rank a token is in."""

    num_tokens: int  # active (sampled) tokens
    num_sequences: int  # sequences with at least one active token


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, pooled over all its micro-batches: one line of `metrics.jsonl`."""

    step: int  # version after the step, counted from 1
    batch_id: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    histograms: dict[str, list[float]] = field(default_factory=dict)


Sums = dict[str, tuple[float | Tensor, float | Tensor]]
"""Statistics on their way: name -> (sum, count). They are added up, and divided once, at the end."""


def add_sums(total: Sums, part: Sums) -> None:
    """Add `part` into `total`, name by name."""
    for name, (value, count) in part.items():
        old_value, old_count = total.get(name, (0.0, 0.0))
        total[name] = (old_value + value, old_count + count)


def pooled(sums: Sums) -> dict[str, float]:
    """Means from (sum, count); NaN where nothing was counted."""
    means = {}
    for name, (value, count) in sums.items():
        count = float(count)
        means[name] = float(value) / count if count else float("nan")
    return means
