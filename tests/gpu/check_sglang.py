"""A real SGLang server under a recipe: contract, three broadcasts under load, a cancellation. Not part of `make test`.

    python tests/gpu/check_sglang.py recipes/smollm2.toml PYTHON [key=value ...]

PYTHON is the interpreter of the environment that has SGLang. Prints a line for each, and ends with an error if one is
off.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from steadyrl.engines.build import PROBE_PROMPTS, build_remote_engine
from steadyrl.engines.launch import running, served_model, server_command
from steadyrl.models.load import load_model, load_tokenizer
from steadyrl.recipe import load_config
from steadyrl.tasks.build import build_task
from steadyrl.types import GenerationRequest

SERVER = ("engine.kind=sglang", 'engine.urls=["http://127.0.0.1:8000"]')
SAMPLES = 32
STEP = 0.01  # by which weights move with each broadcast, in units of their own spread


def main() -> None:
    recipe, python, *overrides = sys.argv[1:]
    config = load_config(Path(recipe), [*SERVER, *overrides])
    sampling, dtype = config.sampling, getattr(torch, config.engine.dtype)
    model = load_model(config.model.path, dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = build_task(config.task, load_tokenizer(config.model.path), seed=0).prompts("train", 0, PROBE_PROMPTS)
    request = GenerationRequest(
        prompts,
        SAMPLES,
        sampling.max_response_tokens,
        sampling.temperature,
        seed=0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_response_tokens=sampling.max_response_tokens // 2,
    )
    with served_model(config.model.path) as folder:
        command = server_command(config, 0, python=python, model=folder)
        print(command)
        with running(command, config.engine.start_timeout_s):
            engine = build_remote_engine(config, prompts)
            try:
                print(f"found {engine.describe()}")
                engine.load_weights(dict(model.named_parameters()), 0)
                print("the contract holds: the first weights are verified")
                ids = engine.submit(request)
                for version in (1, 2, 3):
                    for parameter in model.parameters():
                        noise = torch.randn(parameter.shape, generator=generator).to(dtype)
                        parameter.data += STEP * parameter.std().nan_to_num() * noise
                    start = time.monotonic()
                    engine.load_weights(dict(model.named_parameters()), version)
                    print(f"broadcast {version} verified after {time.monotonic() - start:.1f} s")
                arrived = {}
                while set(ids) - arrived.keys():
                    arrived |= engine.step()
                assert all(rollout.is_trainable for rollout in arrived.values())
                crossed = sum(len(set(r.versions[r.loss_mask].tolist())) > 1 for r in arrived.values())
                print(f"{len(ids)} responses, {crossed} of them over a broadcast")
                canceled = engine.cancel(engine.submit(request)[0])
                print(f"canceled after {canceled.num_sampled} tokens: {canceled.finish}")
                assert canceled.finish in ("canceled", "stop", "length")
            finally:
                engine.close()


if __name__ == "__main__":
    main()
