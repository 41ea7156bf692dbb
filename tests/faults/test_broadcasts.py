"""A thousand broadcasts into running generation: every forward pass has one set of weights, and no request is lost.

Not part of `make test` (it takes a minute): `make test-faults`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from steadyrl.engines.build import build_local_engine
from steadyrl.models.load import load_model
from steadyrl.pipeline.backend import EngineSpec
from steadyrl.pipeline.group_stream import Arrival, Stragglers
from steadyrl.pipeline.process_backend import ProcessBackend
from steadyrl.types import GenerationRequest, Prompt, Rollout

pytestmark = pytest.mark.faults
MODEL = "bundled:tiny_moe"
BROADCASTS = 1000
VARIANTS = 5  # different weights, in turn: version v has those of v % VARIANTS
SAMPLES = 4


def variants() -> list[dict[str, Tensor]]:
    """The bundled weights, each time moved so far that no log-probability stays."""
    found = []
    for seed in range(VARIANTS):
        random = torch.Generator().manual_seed(seed)
        model = load_model(MODEL, torch.float32)
        found.append(
            {
                name: weight.detach() + 0.02 * torch.randn(weight.shape, generator=random)
                for name, weight in model.named_parameters()
            }
        )
    return found


def request(number: int) -> GenerationRequest:
    tokens = np.random.default_rng(number).integers(3, 60, size=4 + number % 7).astype(np.int32)
    return GenerationRequest(
        [Prompt(f"train/{number}", tokens, "", "")], SAMPLES, max_response_tokens=24, temperature=0.8, seed=number
    )


def check(rollout: Rollout) -> None:
    assert rollout.finish in ("stop", "length")
    sampled = rollout.versions[rollout.loss_mask]
    assert (np.diff(sampled) >= 0).all()
    assert np.isfinite(rollout.behavior_logp).all()
    assert (rollout.behavior_logp <= 0).all()


def test_every_token_is_that_of_one_set_of_weights():
    weights = variants()
    engine = build_local_engine(MODEL, "float32", 6, False, "rebuild")
    rollouts: list[Rollout] = []
    submitted = 0
    for version in range(BROADCASTS):
        engine.load_weights(weights[version % VARIANTS], version)
        if engine.num_waiting < 4:
            submitted += len(engine.submit(request(submitted)))
        rollouts += engine.step().values()
    while engine.num_running or engine.num_waiting:
        rollouts += engine.step().values()
    assert len(rollouts) == submitted
    models = [load_model(MODEL, torch.float32) for _ in range(VARIANTS)]
    for model, own in zip(models, weights, strict=True):
        model.load_state_dict(own, strict=False)  # the output matrix may be the embedding
    apart = 0.0
    for rollout in rollouts:
        check(rollout)
        tokens = torch.as_tensor(rollout.token_ids, dtype=torch.int64).unsqueeze(0)
        with torch.no_grad():
            logits = [model(input_ids=tokens).logits[0, :-1].float() / 0.8 for model in models]
        logp = torch.stack([torch.log_softmax(z, dim=-1).gather(-1, tokens[0, 1:, None])[:, 0] for z in logits])
        at = torch.as_tensor(rollout.loss_mask[1:])
        own = torch.as_tensor(rollout.versions[1:])[at] % VARIANTS
        reported = torch.as_tensor(rollout.behavior_logp[1:])[at]
        torch.testing.assert_close(reported, logp[own, at.nonzero()[:, 0]], atol=2e-4, rtol=1e-4)
        apart = max(apart, float((reported - logp[(own + 1) % VARIANTS, at.nonzero()[:, 0]]).abs().max()))
    assert apart > 0.1  # other weights would have been noticed


def test_a_thousand_broadcasts_lose_no_request():
    spec = EngineSpec(MODEL, "float32", 16, False, 1, 300.0, 120.0, "keep", Stragglers(0.0, are_kept=False))
    weights = variants()
    backend = ProcessBackend(spec, weights[0])
    arrived: list[Arrival] = []
    admitted = loaded = 0
    try:
        for version in range(BROADCASTS):
            backend.broadcast(weights[version % VARIANTS], version)
            while admitted - len(arrived) < 8:
                backend.admit([(admitted, request(admitted))])
                admitted += 1
            arrived += backend.arrivals(wait=False)
            loaded += len(backend.loads())
        while len(arrived) < admitted:
            arrived += backend.arrivals(wait=True)
        loaded += len(backend.loads())
    finally:
        backend.close()
    assert loaded == BROADCASTS  # and each was answered with the checksum that was sent
    assert sorted(arrival.number for arrival in arrived) == list(range(admitted))
    newest = -1
    for arrival in arrived:
        assert len(arrival.rollouts) == SAMPLES
        for rollout in arrival.rollouts:
            assert rollout.prompt_id == f"train/{arrival.number}"
            check(rollout)
            newest = max(newest, int(rollout.versions.max()))
    assert newest > BROADCASTS // 2
