"""Two gloo ranks against one process: counts, quantile, loss and gradient."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from objective.batches import (
    AGGREGATIONS,
    Batch,
    loss_and_gradient,
    loss_of,
    make_batch,
    objective_of,
    scores_of,
    threshold_of,
)

from steadyrl.objective.boundary import sat_quantile, sat_quantiles_by_lag
from steadyrl.objective.mask_rules import m2po_limit
from steadyrl.presets import PRESETS
from steadyrl.types import BatchCounts

# a rule that looks at its micro-batch on purpose depends on the cut
PRESETS_OF_ANY_CUT = [name for name in PRESETS if name != "sat-grpo-microbatch"]
CASES = [(preset, aggregation) for preset in PRESETS_OF_ANY_CUT for aggregation in AGGREGATIONS]
SHARES = {"even": [[0, 1, 5], [2, 3, 4, 6]], "one rank empty": [[0, 1, 2, 3, 4, 5, 6], []], "one token": [[1], [0, 2]]}


def of_all(counts: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(counts)
    return counts


def rank_threshold(objective, mine: Batch) -> torch.Tensor | None:
    rule = objective.boundary
    if rule.rule == "m2po":
        return m2po_limit(rule, scores_of(objective, mine), mine.layout, of_all)
    if rule.rule != "sat":
        return None
    if rule.quantile_scope == "lag":
        return sat_quantiles_by_lag(rule, scores_of(objective, mine), mine.layout, mine.age, of_all)
    return sat_quantile(rule, scores_of(objective, mine), mine.layout, of_all)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for share, responses in SHARES.items():
        mine = make_batch().take(responses[rank])
        local = torch.tensor([mine.counts.num_tokens, mine.counts.num_sequences])
        counts = BatchCounts(*of_all(local).tolist())
        for preset, aggregation in CASES:
            objective = objective_of(preset, aggregation)
            threshold = rank_threshold(objective, mine)
            leaf = replace(mine, logp=mine.logp.clone().requires_grad_())
            loss = loss_of(objective, leaf, counts, threshold).loss
            (gradient,) = torch.autograd.grad(loss, leaf.logp)
            results[share, preset, aggregation] = (of_all(loss.detach()), gradient, threshold)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("preset", PRESETS_OF_ANY_CUT)
def test_two_ranks_are_one_process(ranks, preset, share):
    first, second = SHARES[share]
    whole = make_batch().take([*first, *second])
    for aggregation in AGGREGATIONS:
        loss, gradient = loss_and_gradient(objective_of(preset, aggregation), whole)
        for rank in ranks:
            torch.testing.assert_close(rank[share, preset, aggregation][0], loss, rtol=1e-12, atol=1e-14)
        apart = torch.cat([rank[share, preset, aggregation][1] for rank in ranks])
        torch.testing.assert_close(apart, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("preset", [name for name in PRESETS_OF_ANY_CUT if name.startswith("sat")])
def test_every_rank_has_the_same_quantile(ranks, preset, share):
    first, second = SHARES[share]
    alone = threshold_of(objective_of(preset), make_batch().take([*first, *second]))
    assert (alone > 0).any()
    assert all(torch.equal(rank[share, preset, "token_mean"][2], alone) for rank in ranks)
