"""What a run keeps in memory and what it sends, in bytes: arithmetic on the sizes of model and recipe.

The trainer's tensors are spread evenly over its ranks; what does not grow with the number of parameters is held by
each. Sums are upper bounds: not everything is alive at the same moment. The coefficients of the activations were
counted on the model classes of transformers (Qwen3 and Qwen3-MoE, attention `sdpa`, experts `eager`) and are checked by
a test; models without a norm on queries and keys keep a little less.
"""

from __future__ import annotations

from dataclasses import dataclass

from steadyrl.config import RunConfig
from steadyrl.models.logprobs import MAX_LOGITS
from steadyrl.pipeline.schedule import anchor_version, is_broadcast_version, snapshots_needed
from steadyrl.pipeline.weights import NUM_SLOTS
from steadyrl.planning.lengths import MeanLengths
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.placement import Placement

ITEMSIZE = {"bfloat16": 2, "float32": 4}
FLOAT32 = 4
STEP_COUNTER = 4  # AdamW's, one for each parameter tensor
# of a token on its way: its id, whether it was sampled, its log-probability, its version (types.Rollout)
TOKEN_BYTES = 4 + 1 + 4 + 4


@dataclass(frozen=True)
class Item:
    """One line of the arithmetic."""

    name: str
    total: float  # bytes in all ranks, or in all engines
    each: float  # bytes in one rank, or in one device of an engine
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    trainer: list[Item]  # devices of the trainer
    host: list[Item]  # main memory
    engine: list[Item]  # devices of the engines
    checkpoint_bytes: int  # the largest one, without rollouts and tokenizer
    broadcast_bytes: int  # one copy of the weights in the engine's dtype
    rollout_bytes_per_token: int
    cache_bytes_per_token: int
    running_sequences: int  # decoded together by all engines, where memory lets them


def memory_plan(shape: ModelShape, config: RunConfig, placement: Placement, lengths: MeanLengths) -> MemoryPlan:
    broadcast = shape.parameters * ITEMSIZE[config.engine.dtype]
    running = running_sequences(config, placement)
    return MemoryPlan(
        trainer=_trainer(shape, config, placement.trainer_ranks),
        host=_host(shape, config, broadcast, running * lengths.context),
        engine=_engine(shape, config, placement, lengths, running),
        checkpoint_bytes=largest_checkpoint_bytes(shape, config),
        broadcast_bytes=broadcast,
        rollout_bytes_per_token=rollout_bytes_per_token(shape, config),
        cache_bytes_per_token=shape.kv_bytes_per_token(ITEMSIZE[config.engine.dtype]),
        running_sequences=running,
    )


def running_sequences(config: RunConfig, placement: Placement) -> int:
    """Responses that the recipe has decoded together, in all engines; what memory allows is another matter."""
    pipeline = config.pipeline
    streams = pipeline.regime == "streaming"
    groups = pipeline.most_groups_in_flight if streams else pipeline.prompts_per_batch
    return min(groups * pipeline.responses_per_prompt, placement.engines * config.engine.max_sequences)


def adam_bytes(shape: ModelShape) -> int:
    """Two moments in float32 for each parameter, and a step counter for each tensor."""
    return 2 * FLOAT32 * shape.parameters + STEP_COUNTER * shape.parameter_tensors


def checkpoint_bytes(shape: ModelShape, snapshots: int) -> int:
    """Weights, moments, and the snapshots of other versions; all float32."""
    return FLOAT32 * shape.parameters * (1 + snapshots) + adam_bytes(shape)


def largest_checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Of the snapshots, that of the present version is not written: it is the model itself."""
    return checkpoint_bytes(shape, max(0, most_snapshots(config) - 1))


def rollout_bytes_per_token(shape: ModelShape, config: RunConfig) -> int:
    return TOKEN_BYTES + (shape.routed_expert_bytes_per_token if config.model.routing_replay else 0)


def most_snapshots(config: RunConfig) -> int:
    """Sets of float32 weights that the loop keeps beside those being trained, at most (TrainingLoop._keep_snapshot)."""
    pipeline, anchor = config.pipeline, config.objective.anchor
    period = 2 * max(1, pipeline.lag) * pipeline.steps_per_batch + 2 * pipeline.steps_per_batch
    held: set[int] = set()
    most = 0
    for version in range(min(config.trainer.steps, period) + 1):
        scoring = anchor_version(pipeline, anchor, version // pipeline.steps_per_batch)
        needed = snapshots_needed(pipeline, version) | ({scoring} if scoring is not None else set())
        if not is_broadcast_version(pipeline, version) and version != scoring:
            needed.discard(version)
        held = {old for old in held if old in needed} | ({version} & needed)
        most = max(most, len(held))
    return most


def activation_bytes(shape: ModelShape, *, dtype: str, tokens: int, width: int, checkpointing: bool) -> int:
    """What the forward pass of a micro-batch keeps for its backward pass, the output layer left out.

    Args:
        dtype: of the matrix products; norms and the residual stream stay float32.
        tokens: padded tokens of the micro-batch.
        width: of a row. A micro-batch of more than one row has an attention mask of [width, width] for each.
    """
    is_low = dtype == "bfloat16"
    item, is_mixture = ITEMSIZE[dtype], shape.moe_layers > 0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    stream = (24 if is_mixture or not is_low else 26) * shape.hidden  # norms and residuals of a layer
    norms = (10, 10) if is_low else (16, 16)  # queries, keys and values, from their projections to the output's input
    attention = norms[0] * queries + norms[1] * keys
    if (
        shape.kv_heads < shape.heads
    ):  # keys and values are repeated for their queries: 2 of each instead of the originals
        attention += 2 * item * (queries - keys)
    mlp = 4 * item * shape.mlp_width
    if is_mixture:
        per_expert = (8 if is_low else 12) * shape.hidden + mlp + 30
        mlp = shape.experts_per_token * per_expert + 4 * shape.experts
    mask = item * width if tokens >= 2 * width else 0
    layer = stream + attention + mlp + mask
    ends = 2 * FLOAT32 * shape.hidden  # the embeddings and the last norm
    kept = shape.layers * FLOAT32 * shape.hidden + layer if checkpointing else shape.layers * layer
    return tokens * (kept + ends)


def head_bytes(shape: ModelShape, *, dtype: str, tokens: int) -> int:
    """Blocks of logits (models/logprobs.py), and the gradients of hidden states and output matrix."""
    logits = min(tokens * shape.vocabulary, max(MAX_LOGITS, tokens))
    blocks = logits * (2 * FLOAT32 + (ITEMSIZE[dtype] if dtype != "float32" else 0))
    return blocks + tokens * shape.hidden * (FLOAT32 + ITEMSIZE[dtype])


def _trainer(shape: ModelShape, config: RunConfig, ranks: int) -> list[Item]:
    dtype, tokens = config.model.dtype, config.trainer.tokens_per_micro_batch
    longest = min(shape.positions, tokens)
    width = longest if tokens >= 2 * longest else max(1, tokens // 2)  # the rows that make the largest mask
    weights = FLOAT32 * shape.parameters

    def spread(name: str, total: float, how: str) -> Item:
        return Item(name, total, total / ranks, how)

    def held(name: str, each: float, how: str) -> Item:
        return Item(name, each * ranks, each, how)

    items = [
        spread("weights", weights, "4 P"),
        spread("gradients", weights, "4 P"),
        spread("AdamW moments", adam_bytes(shape), "8 P"),
        spread("a copy of the weights", weights, "4 P, while a step is taken or other weights score"),
    ]
    if config.objective.kl_coef > 0:
        items.append(spread("reference weights", weights, "4 P, for the KL penalty"))
    if ranks > 1:
        # one layer runs while the next one is put together
        gathered = 2 * ITEMSIZE[dtype] * shape.largest_layer + ITEMSIZE[dtype] * 2 * shape.vocabulary * shape.hidden
        items.append(held("layers put together", gathered, f"two layers, input and output matrix in {dtype}"))
    elif dtype == "bfloat16":
        items.append(
            held("bfloat16 copies of the weights", 2 * shape.parameters, "2 P, in the forward and backward pass")
        )
    checkpointing = config.model.gradient_checkpointing
    activations = activation_bytes(shape, dtype=dtype, tokens=tokens, width=width, checkpointing=checkpointing)
    way = "with checkpointing" if checkpointing else "no checkpointing"
    items.append(held("activations", activations, f"{tokens:,} tokens in a micro-batch, {way}"))
    items.append(held("logits", head_bytes(shape, dtype=dtype, tokens=tokens), "in blocks, and their gradients"))
    return items


def _host(shape: ModelShape, config: RunConfig, broadcast: int, running_tokens: float) -> list[Item]:
    snapshots, weights = most_snapshots(config), FLOAT32 * shape.parameters
    items = [Item("snapshots", snapshots * weights, snapshots * weights, f"{snapshots} x 4 P, versions still needed")]
    if config.pipeline.backend != "inline":
        how = f"{NUM_SLOTS} x P in {config.engine.dtype}"
        items.append(Item("weights under way", NUM_SLOTS * broadcast, NUM_SLOTS * broadcast, how))
    if config.trainer.ranks > 1:
        items.append(Item("weights gathered", weights, weights, "4 P, from the ranks"))
    if config.model.routing_replay:
        experts = 2 * shape.moe_layers * shape.experts_per_token * running_tokens  # int16 until a response is finished
        items.append(Item("recorded experts", experts, experts, "of the responses in the engines"))
    return items


def _engine(
    shape: ModelShape, config: RunConfig, placement: Placement, lengths: MeanLengths, running: int
) -> list[Item]:
    devices = placement.engines * placement.gpus_per_engine
    dtype = config.engine.dtype
    weights = ITEMSIZE[dtype] * shape.parameters
    per_token = shape.kv_bytes_per_token(ITEMSIZE[dtype])
    cache = running * lengths.context * per_token
    return [
        Item("weights", placement.engines * weights, weights / placement.gpus_per_engine, f"P in {dtype}"),
        Item(
            "keys and values",
            cache,
            cache / devices,
            f"{running:,} sequences x {lengths.context:,.0f} tokens x {per_token:,} bytes",
        ),
    ]
