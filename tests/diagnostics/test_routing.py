import pytest
import torch

from steadyrl.diagnostics.buckets import bucket_means
from steadyrl.diagnostics.routing import disagreement_sums, overlap, overlap_sums
from steadyrl.types import add_sums


def test_disagreement_per_layer_pools_by_counts():
    total = {}
    add_sums(total, disagreement_sums(torch.tensor([3, 0]), torch.tensor([12, 12])))
    add_sums(total, disagreement_sums(torch.tensor([3, 1]), torch.tensor([4, 4])))
    assert bucket_means(total) == {"routing/disagreement": [0.375, 1 / 16]}  # not 0.5, not 1/8


def test_layers_must_match():
    with pytest.raises(AssertionError, match="per layer"):
        disagreement_sums(torch.tensor([1, 2]), torch.tensor([3]))


def test_overlap_ignores_order():
    recorded = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [7, 300, 2, 9]])
    own = torch.tensor([[3, 2, 1, 0], [0, 1, 2, 4], [4, 5, 6, 7], [300, 9, 0, 7]])
    assert overlap(recorded, own).tolist() == [1, 0.75, 0, 0.75]


def brute_force(recorded, own):
    layers = len(recorded[0])
    overlaps, counts, differs = [0.0] * layers, [0] * layers, [0] * layers
    anywhere = tokens = 0
    for old, new in zip(recorded, own, strict=True):
        known = [layer for layer in range(layers) if min(old[layer]) >= 0]
        for layer in known:
            a, b = set(old[layer]), set(new[layer])
            overlaps[layer] += len(a & b) / len(a)
            differs[layer] += a != b
            counts[layer] += 1
        tokens += bool(known)
        anywhere += any(set(old[layer]) != set(new[layer]) for layer in known)
    return overlaps, counts, differs, anywhere, tokens


def test_sums_against_sets():
    generator = torch.Generator().manual_seed(0)
    recorded, own = (torch.rand(40, 3, 6, generator=generator).topk(2).indices for _ in range(2))
    own[:20] = recorded[:20].flip(-1)  # the same sets
    recorded[::7] = -1
    recorded[3, 1] = -1
    recorded[5, 2, 0] = -1  # half a record is none
    overlaps, counts, differs, anywhere, tokens = brute_force(recorded.tolist(), own.tolist())
    sums = overlap_sums(recorded, own)
    assert sums["routing/overlap"][0].tolist() == pytest.approx(overlaps)
    assert sums["routing/overlap"][1].tolist() == sums["routing/disagreement"][1].tolist() == counts
    assert sums["routing/disagreement"][0].tolist() == differs
    assert [part.item() for part in sums["routing/any_layer"]] == [anywhere, tokens]
    assert 0 < anywhere < tokens
    total = {}
    for part in (slice(0, 13), slice(13, 13), slice(13, 40)):
        add_sums(total, overlap_sums(recorded[part], own[part]))
    for name, (value, count) in sums.items():
        torch.testing.assert_close(total[name][0], value)
        torch.testing.assert_close(total[name][1], count)


def test_the_same_experts_agree_everywhere():
    experts = torch.rand(5, 2, 8).topk(3).indices
    sums = overlap_sums(experts, experts.flip(-1))
    assert bucket_means({"routing/overlap": sums["routing/overlap"]}) == {"routing/overlap": [1, 1]}
    assert sums["routing/any_layer"][0] == 0
