"""How fast trainer and engine are: measured, stated in a file, or assumed from the data sheet of a GPU.

A file of rates is TOML. Every key may be left out, and is then assumed:

    decode_step_s = 0.02            # the keys of `Rates`
    train_tokens_per_s = 20000

    [lengths]                       # of prompts and responses, see lengths.py
    mean = 6000

    [hardware]                      # what the assumptions are computed from
    gpu_memory_gib = 141
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from steadyrl.axes import AboveZero, Share, Table, ZeroOrMore
from steadyrl.config import Positive, RunConfig
from steadyrl.errors import ConfigError
from steadyrl.method import nearest
from steadyrl.planning.lengths import Lengths, MeanLengths, StatedLengths, mean_lengths
from steadyrl.planning.memory import ITEMSIZE
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.placement import Placement, placement_of
from steadyrl.planning.work import micro_batches, scoring_passes
from steadyrl.recipe import read_toml

STEP_BYTES = 40  # that AdamW, clipping and the copy before the step read and write for each parameter
ATTENTION_FLOPS = 4  # for each query number and each token attended to: scores and values, multiply and add


# whatever is beyond is a slip, and sums of it leave the numbers of a float
Seconds = Annotated[float, Field(ge=0, le=1e9)]
PerSecond = Annotated[float, Field(ge=1e-9, le=1e18)]


class Rates(Table):
    """Those of the trainer are of all its ranks together; those of decoding and prompts of one engine."""

    decode_step_s: Seconds  # one token for every running sequence, whatever their number ...
    decode_sequence_s: Seconds  # ... and more for each of them
    prefill_token_s: Seconds  # of a prompt, once for all its responses
    train_step_s: Seconds  # of an optimizer step, whatever its tokens
    train_tokens_per_s: PerSecond  # prompt and response
    broadcast_bytes_per_s: PerSecond  # the trainer, while it sends the weights once
    load_bytes_per_s: PerSecond  # the engine, while it takes them over
    grade_response_s: Seconds
    transfer_response_s: Seconds  # from the engine to the trainer, in which neither works
    step_other_s: Seconds  # of the trainer in each step, beside everything else here
    record_batch_s: Seconds  # of writing the rollouts of a batch into the run folder
    checkpoint_bytes_per_s: PerSecond


class Hardware(Table):
    """What assumptions are computed from; by default the data sheet of an 80 GB accelerator of the H100 class."""

    gpu_memory_gib: AboveZero = 80
    gpu_flops: AboveZero = 989e12  # dense, bfloat16, per second
    gpu_bytes_per_s: AboveZero = 3.35e12  # of its memory
    link_bytes_per_s: AboveZero = 50e9  # of a weight broadcast
    disk_bytes_per_s: AboveZero = 2e9
    train_efficiency: Share = 0.3  # of gpu_flops, in training
    decode_efficiency: Share = 0.5  # of gpu_bytes_per_s, in decoding
    kernel_s: ZeroOrMore = 0.005  # of a decode step without any work
    gpus_per_engine: Positive = 1
    cache_share: Share = 0.9  # of the memory that the weights leave, for keys and values


class Assumptions(Table):
    """What a file of rates holds beside the rates."""

    evaluation_prompts: Positive = 30  # of an evaluation on a whole data set
    lengths: StatedLengths = StatedLengths()
    hardware: Hardware = Hardware()


@dataclass(frozen=True)
class Speed:
    """Everything about time and length that a simulation needs, and where it comes from."""

    rates: Rates
    lengths: Lengths
    hardware: Hardware | None  # None: measured, so that the memory that bounds the cache is not known
    assumed: frozenset[str]  # names of rates that nobody measured or stated
    source: str  # a sentence
    evaluation_prompts: int  # of an evaluation on a whole data set


def stated_speed(path: Path | None, shape: ModelShape, config: RunConfig) -> Speed:
    """From a file of rates, or from assumptions alone.

    Raises:
        ConfigError: the file cannot be read, or one of its keys is unknown or out of range.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"there is no file of rates at {path}: leave --rates out to have them assumed")
    given = {} if path is None else read_toml(path)
    known = Rates.model_fields.keys() | Assumptions.model_fields.keys()
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
    stated = {name: value for name, value in given.items() if name in Rates.model_fields}
    try:
        basis = Assumptions.model_validate({name: value for name, value in given.items() if name not in stated})
        hardware = basis.hardware
        assumed = assume(shape, config, placement_of(config, hardware.gpus_per_engine), hardware, basis.lengths)
        rates = Rates.model_validate({**assumed.model_dump(), **stated})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {key}: {first['msg']} (got {first['input']!r})") from None
    names = frozenset(Rates.model_fields.keys() - stated.keys())
    guess = "assumed from the data sheet of a GPU and not measured"
    source = f"the rates are {guess}" if path is None else f"rates of {path}; those marked are {guess}"
    return Speed(rates, basis.lengths, hardware, names, source, basis.evaluation_prompts)


def assume(shape: ModelShape, config: RunConfig, placement: Placement, hardware: Hardware, lengths: Lengths) -> Rates:
    """Rates from a data sheet: decoding is bound by what it reads, training by what it computes."""
    pipeline = config.pipeline
    means = mean_lengths(lengths, pipeline.responses_per_prompt, config.sampling.max_response_tokens)
    read = hardware.gpu_bytes_per_s * hardware.decode_efficiency * placement.gpus_per_engine
    item = ITEMSIZE[config.engine.dtype]
    weights = shape.parameters * item
    ranks = placement.trainer_ranks
    compute = hardware.gpu_flops * hardware.train_efficiency
    return Rates(
        decode_step_s=hardware.kernel_s + weights / read,
        decode_sequence_s=shape.kv_bytes_per_token(item) * means.context / read,
        prefill_token_s=forward_flops(shape, means.prompt / 2) / (compute * placement.gpus_per_engine),
        train_step_s=STEP_BYTES * shape.parameters / (hardware.gpu_bytes_per_s * hardware.decode_efficiency * ranks),
        train_tokens_per_s=ranks * compute / training_flops(shape, config, means, ranks),
        broadcast_bytes_per_s=hardware.link_bytes_per_s,
        load_bytes_per_s=hardware.link_bytes_per_s,
        grade_response_s=0.002,
        transfer_response_s=1e-4,
        step_other_s=0.0,
        record_batch_s=0.0,
        checkpoint_bytes_per_s=hardware.disk_bytes_per_s,
    )


def forward_flops(shape: ModelShape, context: float) -> float:
    """Floating-point operations of one token in a forward pass: 2 for each active parameter, and attention."""
    return 2 * shape.active_parameters + ATTENTION_FLOPS * shape.layers * shape.heads * shape.head_dim * context


def training_flops(shape: ModelShape, config: RunConfig, means: MeanLengths, ranks: int) -> float:
    """Of one token in an optimizer step: a backward pass costs two forward passes, recomputation one more."""
    passes = 3 + config.model.gradient_checkpointing + scoring_passes(config, micro_batches(config, means, ranks))
    return passes * forward_flops(shape, means.context)


def cache_room(shape: ModelShape, config: RunConfig, placement: Placement, speed: Speed) -> float | None:
    """Tokens of which all engines together can keep keys and values; None where the hardware is not known."""
    if speed.hardware is None:
        return None
    hardware = speed.hardware
    item = ITEMSIZE[config.engine.dtype]
    memory = hardware.gpu_memory_gib * 2**30 * placement.gpus_per_engine
    free = (memory - shape.parameters * item) * hardware.cache_share
    return max(0.0, placement.engines * free / shape.kv_bytes_per_token(item))
