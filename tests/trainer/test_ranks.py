"""Two processes that train together: the same step as one, the same errors on both. `make test-scale` has the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer.rank_runs import (
    cut,
    make_learner,
    make_rollouts,
    on_one_process,
    on_ranks,
    run_config,
    same_step,
    steps_of,
)

from steadyrl.diagnostics.mismatch import abs_quantiles
from steadyrl.errors import ConfigError, EngineError, TrainingError
from steadyrl.models.load import load_model
from steadyrl.pipeline.packing import share
from steadyrl.trainer.ranks import ALONE, TorchRanks, gather_texts
from steadyrl.trainer.sharding import training_device
from steadyrl.trainer.step_statistics import _abs_quantiles

TINY = "bundled:tiny_moe"
PRESETS = ["sat-gspo", "m2po", "grpo-tis", "dppo-topk-tv"]  # q, a limit, old weights, distributions


@pytest.fixture(scope="module")
def groups():
    return make_rollouts()


@pytest.fixture(scope="module")
def cases(groups):
    found = {name: (run_config(name), cut(groups, run_config(name))) for name in PRESETS}
    run = run_config("sat-grpo-lag")
    found["one group, so that ranks run out of work"] = run, cut(groups[3:4], run)
    batches = cut(groups, run, ranks=1)
    found["a rank without any work"] = run, [*batches, *[batches[0].blank()] * len(batches)]
    return found


def exchange(ranks: TorchRanks) -> Any:
    mine = torch.arange(3 * ranks.index)  # nothing on rank 0
    return (
        ranks.sum(torch.tensor([ranks.index + 1, 2**40])),
        ranks.gather(mine),
        gather_texts(ranks, ["", "τ > 0"][ranks.index]),
    )


def fail_alike(ranks: TorchRanks, groups: Any) -> list[str]:
    """What a broken reward, and a missing record of the support, make of a step; then a step that is whole again."""
    said = []
    run = run_config("sat-gspo")
    learner = make_learner(load_model(TINY, torch.float32), run, ranks)
    before = {name: parameter.detach().clone() for name, parameter in learner._model.named_parameters()}
    groups[3][1].reward = math.inf
    with pytest.raises(TrainingError) as training:
        learner.train_step(share(cut(groups, run, 2), ranks.index, 2), None)
    said.append(str(training.value))
    for name, parameter in learner._model.named_parameters():
        assert torch.equal(before[name].to_local(), parameter.to_local()), name  # type: ignore[attr-defined]
    groups[3][1].reward = 0.0
    assert learner.version == 8
    assert math.isfinite(
        learner.train_step(share(cut(groups, run, 2), ranks.index, 2), None).metrics["optim/grad_norm"]
    )
    restricted = run_config("sat-gspo", "sampling.top_k=5")
    with pytest.raises(EngineError) as engine:
        make_learner(load_model(TINY, torch.float32), restricted, ranks).train_step(
            share(cut(groups, restricted, 2), ranks.index, 2), None
        )
    return [*said, str(engine.value)]


def everything(ranks: TorchRanks, cases: Any, groups: Any, folder: str) -> dict[str, Any]:
    learner = make_learner(load_model(TINY, torch.float32), run_config("sat-gspo"), ranks)
    learner.train_step(share(cases["sat-gspo"][1], ranks.index, ranks.count), None)
    weights = learner.named_weights()
    learner.save(Path(folder))
    return {
        "exchange": exchange(ranks),
        "steps": steps_of(cases, ranks),
        "errors": fail_alike(ranks, groups),
        "weights": weights,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory, cases, groups):
    """What each of two ranks found, and the folder that they saved into."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, folder, everything, cases, groups, str(folder)), folder


def test_they_tell_each_other(found):
    for total, parts, texts in (rank["exchange"] for rank in found[0]):
        assert total.tolist() == [3, 2**41]
        assert [part.tolist() for part in parts] == [[], [0, 1, 2]]
        assert texts == ["τ > 0"]


@pytest.mark.parametrize("case", [*PRESETS, "one group, so that ranks run out of work", "a rank without any work"])
def test_two_ranks_take_the_step_of_one(found, cases, case):
    same_step([rank["steps"][case] for rank in found[0]], on_one_process({case: cases[case]})[case])


def test_both_fail_in_the_same_words_and_name_the_rollouts(found, groups):
    first, second = (rank["errors"] for rank in found[0])
    assert first == second
    assert first[0].count("rollout of") == 4, "the four whose advantages are not numbers"
    assert groups[3][1].prompt_id in first[0]
    assert "does not record which tokens" in first[1]


def test_what_two_saved_one_goes_on_from(found, tokenizer):
    ranks, folder = found
    assert ranks[1]["weights"] == {}
    learner = make_learner(load_model(TINY, torch.float32), run_config("sat-gspo"), None)
    learner.load(folder, version=9)
    assert learner.version == 9
    assert learner.named_weights().keys() == ranks[0]["weights"].keys()
    for name, weight in learner.named_weights().items():
        assert torch.equal(weight, ranks[0]["weights"][name]), name
    states = [learner._optimizer.state[parameter] for parameter in learner._model.parameters()]
    assert {float(state["step"]) for state in states} == {1.0}
    assert all(state["exp_avg"].abs().sum() > 0 for state in states)


def test_quantiles_by_counting_are_those_by_sorting():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 1000):
        logp, behavior = -torch.rand(2, size, generator=generator)
        sorted_ = abs_quantiles(logp, behavior, torch.ones(size, dtype=torch.bool))
        assert _abs_quantiles(logp, behavior, ALONE) == {name: float(value) for name, value in sorted_.items()}
    assert all(np.isnan(value) for value in _abs_quantiles(torch.zeros(0), torch.zeros(0), ALONE).values())


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device("auto") == training_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"set trainer\.device=auto or cpu"):
        training_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_device("auto") == training_device("cuda") == torch.device("cuda")
