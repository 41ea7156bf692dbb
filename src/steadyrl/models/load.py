"""Hugging Face causal language models: found, loaded, saved.

A path takes one of four forms: a folder, a hub name, `bundled:NAME` (shipped with steadyrl), or
`package:PACKAGE/FILE.gguf` (weights that an installed Python package carries).
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import ModelConfig
from steadyrl.errors import ConfigError
from steadyrl.models.checkpointing import checkpoint_layers

Loaded = TypeVar("Loaded")

REAL = 'pip install "steadyrl[real]"'
GGUF_READERS = ("gguf", "accelerate")  # transformers needs both to read a GGUF file
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# the fastest on a CPU, and the ones whose routing can be recorded and replayed; models without experts ignore it
EXPERTS = "eager"


def resolve_path(path: str) -> tuple[str, str | None]:
    """(folder or hub name, GGUF file inside it or None). The hub is not asked whether it knows a name.

    Raises:
        ConfigError: if the folder, the bundled model, the package or its file is missing.
    """
    if path.startswith("bundled:"):
        return _bundled(path.removeprefix("bundled:")), None
    if path.startswith("package:"):
        return _in_package(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{path} holds no config.json: set model.path to a folder in Hugging Face format")
        return str(folder), None
    if folder.is_file():
        raise ConfigError(f"{path} is a file: set model.path to the folder that holds it")
    if not HUB_NAME.fullmatch(path):
        raise ConfigError(f"there is no folder {path}: set model.path to a model folder, or to bundled:tiny_moe")
    return path, None


def _bundled(name: str) -> str:
    assets = Path(str(importlib.resources.files("steadyrl"))) / "assets"
    if name not in _folders(assets):
        known = ", ".join(f"bundled:{known}" for known in _folders(assets)) or "none"
        raise ConfigError(f"no bundled model is called {name!r}; there are: {known}")
    return str(assets / name)


def _folders(assets: Path) -> list[str]:
    return sorted(config.parent.name for config in assets.glob("*/config.json"))


def _in_package(path: str) -> tuple[str, str]:
    package, _, file = path.removeprefix("package:").partition("/")
    if not package.isidentifier() or not file.endswith(".gguf"):
        raise ConfigError(f"{path!r} does not name a GGUF file: write package:PACKAGE/FILE.gguf")
    spec = importlib.util.find_spec(package)  # finds the folder without running the package's code
    if spec is None:
        pip_name = package.replace("_", "-")
        raise ConfigError(f"{path} needs the package {package}: {REAL}, then pip install --no-deps {pip_name}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / file).is_file():
            return str(folder), file
    known = ", ".join(sorted(found.name for folder in folders for found in folder.glob("*.gguf"))) or "none"
    raise ConfigError(f"the package {package} holds no file {file!r}; its GGUF files are: {known}")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model at `path`; see `resolve_path`."""
    return _from_hugging_face(path, AutoTokenizer.from_pretrained)


def load_policy(config: ModelConfig) -> PreTrainedModel:
    """The model to train, as the recipe describes it. Its parameters are float32 whatever `config.dtype` is.

    Raises:
        ConfigError: as `load_model`; or its layers cannot be recomputed.
    """
    model = load_model(config.path, torch.float32, attention=config.attention)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    return model


def load_model(path: str, dtype: torch.dtype, attention: str = "auto") -> PreTrainedModel:
    """The model at `path` on the CPU, every parameter in `dtype`, in evaluation mode.

    Attention is `sdpa` or `eager`; `auto` takes `sdpa` where the model has it.

    Buffers keep the dtype of their class: `model.to(dtype)` would also round the rotary frequencies.
    A GGUF file is dequantized once, which takes about 20 s for 135 M parameters; what `save_model`
    wrote loads in a second. Its weights are rounded to bfloat16 first, whatever `dtype` is: scales of 11
    significant bits put many weights halfway between two bfloat16 numbers, and an optimizer step of any
    size tips each of these over in an engine that samples in bfloat16 (docs/experiments.md).

    Raises:
        ConfigError: if there is no such model or it cannot be read, or it has no such attention.
    """
    options: dict[str, Any] = {"dtype": dtype, "experts_implementation": EXPERTS}
    if attention != "auto":
        options["attn_implementation"] = attention
    if path.endswith(".gguf") and hasattr(transformers, "GgufConfig"):
        # versions that have this class may keep the weights packed, which can be neither trained nor saved
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = _from_hugging_face(path, AutoModelForCausalLM.from_pretrained, output_loading_info=True, **options)
    model, info = loaded
    _check_complete(path, info)
    if path.endswith(".gguf"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    return model.eval()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer in Hugging Face format (safetensors); `load_model` gives the same bits back.

    Args:
        weights: whole parameters and buffers by name, of a model that does not hold them whole itself.
    """
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a response: those of the tokenizer, the config and the generation config."""
    ids: set[int] = set()
    for source in (tokenizer, model.config, model.generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def context_length(model: PreTrainedModel) -> int:
    """The longest sequence, prompt and response together, that the positions of the model allow, in tokens."""
    return int(model.config.get_text_config().max_position_embeddings)


def _from_hugging_face(path: str, load: Callable[..., Loaded], **options: Any) -> Loaded:
    folder, gguf_file = resolve_path(path)
    if gguf_file is not None:
        missing = [name for name in GGUF_READERS if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"reading {gguf_file} needs the package {' and '.join(missing)}: {REAL}")
        options["gguf_file"] = gguf_file
    try:
        return load(folder, **options)
    except Exception as error:  # files from outside can be broken in any way, and each library has its own errors
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if "support an attention implementation" in reason:
            raise ConfigError(
                f"{path} has no {options['attn_implementation']} attention: set model.attention to auto or eager"
            ) from error
        raise ConfigError(f"{path} cannot be loaded, set model.path to a causal language model: {reason}") from error


def _check_complete(path: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that leaves weights at their random start; tied weights are not reported as missing."""
    for problem in ("missing_keys", "mismatched_keys"):
        if info.get(problem):
            names = sorted(str(key) for key in info[problem])
            raise ConfigError(
                f"{path} does not hold the weights of its config.json ({len(names)} {problem.replace('_', ' ')}, "
                f"first {names[0]}): set model.path to a complete checkpoint"
            )
