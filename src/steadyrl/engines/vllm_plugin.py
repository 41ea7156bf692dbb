"""Runs inside vLLM: weights from a folder, and the repair of a fault of vLLM on a CPU.

vLLM loads this through the entry point `vllm.general_plugins`, in its server and in each of its workers, if steadyrl is
installed beside it (without its dependencies will do: this file imports none of them).

* The weight-transfer backend `steadyrl-disk`: `update_weights` reads a Hugging Face checkpoint from a folder. A weight
  that the checkpoint does not hold, which vLLM would leave as it was, ends the update with an error.
* vLLM (0.32, 0.33) on a CPU repacks the weights of the experts of a mixture-of-experts layer when it loads them first,
  but not when it loads them again: every later update returns "ok", and the experts compute with scrambled weights.
  The environment variable STEADYRL_VLLM_REPACK=0 leaves that as it is, to see what it does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "steadyrl-disk"
REPACK = "STEADYRL_VLLM_REPACK"


def register() -> None:
    """The entry point; vLLM may call it several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, disk_engine())
    if os.environ.get(REPACK, "1") != "0":
        repack_experts()


def repack_experts() -> None:
    """Have vLLM repack the experts of a CPU whenever it loads weights."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    method: Any = UnquantizedFusedMoEMethod
    set_up = method._setup_kernel
    if not current_platform.is_cpu() or getattr(set_up, "repacks", False):
        return

    def set_up_and_repack(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        set_up(self, layer, *args, **kwargs)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_repack.repacks = True  # pyright: ignore[reportFunctionMemberAccess]
    method._setup_kernel = set_up_and_repack


def disk_engine() -> type:
    """The class of the backend; made here because its base is vLLM's."""
    import torch
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # pyright: ignore[reportMissingImports]

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """There is nothing to agree on."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        folder: str  # of a Hugging Face checkpoint, as this process sees it

    class DiskEngine(WeightTransferEngine):
        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():  # the base class would ask a CPU for its accelerator
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.model.load_weights(read_weights(Path(update_info.folder)))

        def finish_weight_update(self) -> None:
            missing = without_weights(self.model)
            finalize_layerwise_reload(self.model, self.model_config)
            if missing:
                raise RuntimeError(f"no weights arrived for {len(missing)} layers, the first is {missing[0]}")

        def shutdown(self) -> None:
            pass

    return DiskEngine


def read_weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint, one at a time.

    Raises:
        FileNotFoundError: the folder is not seen from here, or holds no weights.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no weights in {folder} as seen from this server: set engine.weights_dir")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, tensors.get_tensor(name)


def without_weights(model: Any) -> list[str]:
    """Layers with parameters that got no weights since `initialize_layerwise_reload`.

    One that got some may be whole: vLLM pads vocabularies.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # pyright: ignore[reportMissingImports]

    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        has_parameters = next(layer.parameters(recurse=False), None) is not None
        if has_parameters and info.can_load() and info.load_numel <= 0 and not is_deferred_attention_layer(layer):
            missing.append(name)
    return missing
