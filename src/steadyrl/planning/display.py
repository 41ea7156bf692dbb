"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from steadyrl.planning.memory import TOKEN_BYTES, Item
from steadyrl.planning.plan import Plan
from steadyrl.planning.trainer_clock import Prediction

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show(plan: Plan, console: Console) -> None:
    """Sizes, memory, traffic, rates, and one line for each regime."""
    for sentence in _facts(plan):
        console.print(sentence, soft_wrap=True)
    console.print(_memory(plan))
    console.print(_traffic(plan))
    console.print(plan.speed.source, soft_wrap=True)
    console.print(_rates(plan))
    console.print(_time(plan.predictions))
    for regime, why in plan.refused.items():
        console.print(f"no {regime} row: {why}", soft_wrap=True)


def size(count: float) -> str:
    """Bytes with a binary unit and three digits."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.3g} {UNITS[unit]}"


def seconds(value: float) -> str:
    """A duration in a unit that suits it."""
    if value >= 36_000:
        return f"{value / 3600:.3g} h"
    if value >= 600:
        return f"{value / 60:.3g} min"
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def _facts(plan: Plan) -> list[str]:
    shape, memory = plan.shape, plan.memory
    recorded = memory.rollout_bytes_per_token - TOKEN_BYTES
    facts = [
        f"{shape.parameters:,} parameters P, {shape.active_parameters:,} active for a token",
        f"{plan.lengths.prompt:,.0f} prompt and {plan.lengths.response:,.0f} response tokens on average; the average "
        f"sampled token has {plan.lengths.context:,.0f} before it",
        f"a token takes {memory.cache_bytes_per_token:,} bytes of keys and values in the engine, and "
        f"{memory.rollout_bytes_per_token:,} bytes on its way to the trainer"
        + (f", {recorded} of them for its experts" if recorded else ""),
    ]
    if plan.cache_room is not None:
        fitting = int(plan.cache_room / plan.lengths.context)
        facts.append(
            f"keys and values of {plan.cache_room:,.0f} tokens fit into the engines: {fitting:,} sequences at a time "
            f"of the {memory.running_sequences:,} that the recipe asks for"
        )
    return facts


def _memory(plan: Plan) -> Table:
    placement = plan.placement
    table = Table(title="memory", title_justify="left", pad_edge=False)
    for name in ("what", "all", "each", "how"):
        table.add_column(name, justify="left" if name in ("what", "how") else "right")
    sections: list[tuple[str, Sequence[Item]]] = [
        (f"trainer, {_count(placement.trainer_ranks, 'rank')}", plan.memory.trainer),
        ("main memory", plan.memory.host),
        (
            f"rollouts, {_count(placement.engines, 'engine')} on {_count(placement.gpus_per_engine, 'device')} each",
            plan.memory.engine,
        ),
    ]
    for title, items in sections:
        table.add_row(title, style="bold")
        for item in items:
            table.add_row(f"  {item.name}", size(item.total), size(item.each), item.how)
        total, each = sum(item.total for item in items), sum(item.each for item in items)
        table.add_row("  sum, an upper bound", size(total), size(each), end_section=True)
    table.add_row("checkpoint", size(plan.memory.checkpoint_bytes), "", "weights, moments, snapshots; on disk")
    return table


def _traffic(plan: Plan) -> Table:
    table = Table(title="sent in an optimizer step", title_justify="left", pad_edge=False)
    for name in ("what", "bytes", "how"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for item in plan.traffic:
        table.add_row(item.name, size(item.bytes_per_step), item.how)
    return table


def _rates(plan: Plan) -> Table:
    speed = plan.speed
    table = Table(title="rates", title_justify="left", pad_edge=False, show_header=False)
    for name, value in speed.rates.model_dump().items():
        text = seconds(value) if name.endswith("_s") and "per_s" not in name else _per_second(name, value)
        table.add_row(name, text, "assumed" if name in speed.assumed else "")
    return table


def _time(predictions: Sequence[Prediction]) -> Table:
    table = Table(
        title=f"time, simulated over {predictions[0].steps} optimizer steps", title_justify="left", pad_edge=False
    )
    names = ("regime", "lag", "step", "tokens/s", "trainer", "engine", "lag mean", "max", "places", "whole run")
    for name in names:
        table.add_column(name, justify="left" if name == "regime" else "right")
    for one in predictions:
        table.add_row(
            one.regime,
            str(len(one.lag_shares) - 1 if one.regime == "streaming" else one.lag),
            seconds(one.step_s),
            f"{one.tokens_per_s:,.0f}",
            f"{100 * one.trainer_working:.0f} %",
            f"{100 * one.engine_working:.0f} %",
            f"{one.lag_mean:.2f}",
            str(one.lag_max),
            f"{one.places:,}",
            seconds(one.run_s),
        )
    return table


def _per_second(name: str, value: float) -> str:
    return f"{size(value)}/s" if "bytes" in name else f"{value:,.0f} /s"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
