"""What is installed and usable here, and whether a rollout server is what a recipe needs. Nothing is changed."""

from __future__ import annotations

import asyncio
import platform
import re
import secrets
import shutil
from collections.abc import Sequence
from importlib import metadata

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import RunConfig
from steadyrl.engines.build import build_dialect, probe_request
from steadyrl.engines.completion_check import check_completions
from steadyrl.engines.contract import difference, gap, sampling_difference, score
from steadyrl.engines.dialect import Completion, Dialect, ServerFault
from steadyrl.engines.http_client import JsonClient
from steadyrl.engines.server import Server
from steadyrl.engines.server_check import ServerCheck
from steadyrl.engines.weight_folder import SHARED_MEMORY
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model, load_tokenizer
from steadyrl.types import GenerationRequest, Prompt

TEXTS = ("1+2+3=", "9+4+5+1=", "7+7=", "2+8+6+3+1=")  # that every tokenizer has tokens for
CORE = ("steadyrl", "torch", "transformers", "vllm", "sglang")
ANSWER_S = 120.0
GIB = 2**30
Row = tuple[str, str]


def check_installation(console: Console) -> None:
    """Print versions of the packages of steadyrl and its extras, the GPUs, and the room in shared memory."""
    rows: list[Row] = [("Python", platform.python_version())]
    rows += [(name, _version(name) or "not here (may be in an environment of its own)") for name in CORE]
    rows += [(f"extra {extra}", _extra(extra)) for extra in _extras()]
    rows += [("GPUs", ", ".join(_gpus()) or "none that torch can use")]
    rows += [("shared memory", _shared_memory())]
    _show("installed here", rows, console)


def check_server(config: RunConfig, console: Console) -> None:
    """Compare the first server of a configuration with its model and sampling settings, and print what was found.

    The server keeps the weights that it has: they have to be those of `model.path`.

    Raises:
        EngineError: it does not answer, or differs in what the recipe needs.
        ConfigError: the model cannot be loaded.
    """
    mirror = load_model(config.model.path, getattr(torch, config.engine.dtype))
    tokenizer = load_tokenizer(config.model.path)
    dialect = build_dialect(config, mirror, tokenizer)
    rows, faults = asyncio.run(_compare(config, dialect, mirror, tokenizer))
    url = config.engine.urls[0]
    _show(f"{url}, and what the recipe needs", rows, console)
    if faults:
        raise EngineError(f"the server at {url} is not what the recipe needs: {'; '.join(faults)}")


async def _compare(
    config: RunConfig, dialect: Dialect, mirror: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Row], list[str]]:
    """What was found, and what of it has to change."""
    encoded = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in TEXTS]
    probe = probe_request(config, [Prompt(t, ids, t, "") for t, ids in zip(TEXTS, encoded, strict=True)])
    replays = config.model.routing_replay
    check = ServerCheck(config.engine, dialect, mirror, tokenizer, probe, records_routing=replays)
    client = JsonClient(config.engine.urls[0])
    rows: list[Row] = []
    faults: list[str] = []
    try:
        info = await dialect.info(client)
        rows += [
            ("software", info.software),
            ("model", f"{info.model}; recipe: {config.model.path}"),
            ("weights are called", info.weight_version),
            ("dtype", f"{info.dtype or 'not told'}; recipe: {config.engine.dtype}"),
            ("log-probabilities", info.logprobs or "not told"),
            ("longest sequence", f"{info.context_length or 'not told'}; model: {check.context_length}"),
        ]
        try:
            check.examine(Server(config.engine.urls[0], client), info)
        except ServerFault as fault:
            faults.append(str(fault))
        difference_of_tokens = await _tokenizer_difference(dialect, client, probe)
        rows.append(("tokenizer", "differs" if difference_of_tokens else "agrees, or not told"))
        faults += [difference_of_tokens] if difference_of_tokens else []
        answers = await _sample(dialect, client, probe, info.weight_version, routed_experts=replays)
    except ServerFault as fault:
        return rows, [*faults, str(fault)]
    finally:
        await client.close()
    compared, fault = _contract(mirror, probe, answers, config.engine.probe_tolerance)
    return rows + compared, faults + ([fault] if fault else [])


async def _tokenizer_difference(dialect: Dialect, client: JsonClient, probe: GenerationRequest) -> str | None:
    for prompt in probe.prompts:
        ours = prompt.token_ids.tolist()
        theirs = await dialect.tokenize(client, prompt.text, timeout_s=ANSWER_S)
        if theirs is not None and list(theirs) != ours:
            return (
                f"its tokenizer makes {list(theirs)[:8]} of {prompt.text!r}, and that of model.path {ours[:8]}: start "
                "it with the model of model.path"
            )
    return None


async def _sample(
    dialect: Dialect, client: JsonClient, probe: GenerationRequest, version: str, *, routed_experts: bool
) -> list[list[Completion]]:
    """Raises ServerFault where an answer cannot be true."""
    answers = await asyncio.gather(
        *(
            dialect.generate(
                client,
                f"doctor-{secrets.token_hex(4)}",
                prompt,
                probe,
                weights=version,
                routed_experts=routed_experts,
                timeout_s=ANSWER_S,
            )
            for prompt in probe.prompts
        )
    )
    for prompt, completions in zip(probe.prompts, answers, strict=True):
        check_completions(
            completions,
            prompt_tokens=len(prompt.token_ids),
            request=probe,
            versions={version},
            routed_experts=routed_experts,
        )
    return answers


def _contract(
    mirror: PreTrainedModel, probe: GenerationRequest, answers: list[list[Completion]], tolerance: float
) -> tuple[list[Row], str | None]:
    """How far the reported log-probabilities are from the model's, and what to change where that is too far."""
    sequences = [
        (prompt.token_ids.tolist(), completion.token_ids)
        for prompt, answer in zip(probe.prompts, answers, strict=True)
        for completion in answer
    ]
    reference = score(mirror, sequences, temperature=probe.temperature, top_p=probe.top_p, top_k=probe.top_k)
    reported = np.array([logp for answer in answers for completion in answer for logp in completion.logp])
    rows = [
        ("mean difference in nats", f"over {len(reported)} sampled tokens; tolerance {tolerance:g}"),
        ("  from the sampled distribution", f"{gap(reported, reference.processed):.4f}"),
        ("  from that without top-p and top-k", f"{gap(reported, reference.tempered):.4f}"),
        ("  from that without temperature", f"{gap(reported, reference.raw):.4f}"),
    ]
    return rows, difference(reported, reference, tolerance) or sampling_difference(reference, tolerance)


def _show(title: str, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: a server's words are no markup
    console.print(table)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> list[str]:
    return metadata.metadata("steadyrl").get_all("Provides-Extra") or []


def _extra(extra: str) -> str:
    """The packages of an extra with their versions, and how to install those that are missing."""
    marked = [line for line in metadata.requires("steadyrl") or [] if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in marked]
    versions = {name: _version(name) for name in names if name != "steadyrl"}
    missing = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    remedy = f'without {", ".join(missing)}: pip install "steadyrl[{extra}]"' if missing else ""
    return "; ".join(part for part in (there, remedy) if part)


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _shared_memory() -> str:
    if not SHARED_MEMORY.is_dir():
        return "none: set engine.weights_dir for rollout servers"
    usage = shutil.disk_usage(SHARED_MEMORY)
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
