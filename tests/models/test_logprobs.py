"""Log-probabilities in chunks: the numbers and gradients of the plain way, with little of it in memory at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steadyrl.errors import EngineError
from steadyrl.models.logprobs import Projection, Support, chosen_logp, logp_at, token_logp

T, V, H = 23, 61, 12
CUTS = (1, 4 * V, 1000 * V)  # the narrowest blocks, uneven ones, all at once


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.fixture
def targets() -> Tensor:
    return torch.randint(V, (T,), generator=torch.Generator().manual_seed(5))


def tails() -> list[tuple[float, float | None, bool]]:
    """(scale, soft-cap, bias?) of Llama, Granite, Cohere, Gemma 2, Phi, and all together."""
    return [(1.0, None, False), (0.125, None, False), (1.0, 2.5, False), (1.0, None, True), (1.7, 2.0, True)]


def plain(states, weight, bias, scale, softcap, targets, temperature) -> tuple[Tensor, Tensor]:
    """The textbook way: all logits, one log-softmax; entropy is -sum p log p."""
    z = states @ weight.t() + (0 if bias is None else bias)
    z = z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z.float() / temperature, dim=-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("max_logits", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), tails())
def test_value_and_gradient_are_those_of_the_plain_way(scale, softcap, has_bias, temperature, max_logits, targets):
    logp_weight, entropy_weight = random(T, seed=3), random(T, seed=4)
    results = []
    for chunked in (False, True):
        states, weight = leaf(random(T, H, seed=1)), leaf(random(V, H, seed=2))
        bias = leaf(random(V, seed=6)) if has_bias else None
        if chunked:
            projection = Projection(weight, bias, scale, softcap)
            logp, entropy = chosen_logp(projection, states, targets, temperature, max_logits=max_logits)
        else:
            logp, entropy = plain(states, weight, bias, scale, softcap, targets, temperature)
        (logp * logp_weight + entropy * entropy_weight).sum().backward()
        gradients = [leaf.grad for leaf in (states, weight, bias) if leaf is not None]
        results.append([logp, entropy, *gradients])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("used", ["logp", "entropy"])
def test_either_output_can_be_used_alone(used, targets):
    gradients = []
    for chunked in (False, True):
        states, weight = leaf(random(T, H, seed=1)), leaf(random(V, H, seed=2))
        outputs = (
            chosen_logp(Projection(weight), states, targets, 0.8, max_logits=3 * V)
            if chunked
            else plain(states, weight, None, 1.0, None, targets, 0.8)
        )
        outputs[used == "entropy"].pow(2).sum().backward()
        gradients.append((states.grad, weight.grad))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


def test_the_backward_pass_agrees_with_finite_differences(targets):
    """Along random directions of the states, in steps that float32 can resolve."""
    projection = Projection(random(V, H, seed=2), random(V, seed=6), 0.7, 3.0)
    states = leaf(random(T, H, seed=1))

    def loss(at: Tensor) -> Tensor:
        logp, entropy = chosen_logp(projection, at, targets, 0.9, max_logits=5 * V)
        return (logp.double() + 0.5 * entropy.double()).sum()

    (gradient,) = torch.autograd.grad(loss(states), states)
    for seed in range(3):
        direction = random(T, H, seed=10 + seed)
        slope = (loss(states.detach() + 1e-2 * direction) - loss(states.detach() - 1e-2 * direction)) / 2e-2
        assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=2e-3, abs=2e-3)


def test_bfloat16_products_give_float32_numbers(targets):
    """In bfloat16 both ways round the logits the same; the gradients differ by the rounding of their products."""
    results = []
    for chunked in (False, True):
        states = leaf(random(T, H, seed=1, dtype=torch.bfloat16))
        projection = Projection(leaf(random(V, H, seed=2, dtype=torch.bfloat16)))
        logp = (
            chosen_logp(projection, states, targets, 0.7, max_logits=4 * V)[0]
            if chunked
            else token_logp(projection.logits(states), targets, 0.7)
        )
        logp.sum().backward()
        results.append((logp, states.grad, projection.weight.grad))
    assert results[1][0].dtype == torch.float32
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    for found, wanted in zip(results[1][1:], results[0][1:], strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.03)


def test_frozen_weights_get_no_gradient(targets):
    states, weight = leaf(random(T, H, seed=1)), random(V, H, seed=2)
    chosen_logp(Projection(weight), states, targets, 1.0, max_logits=4 * V)[0].sum().backward()
    assert weight.grad is None
    assert states.grad is not None
    (wanted,) = torch.autograd.grad(token_logp(Projection(weight).logits(states), targets, 1.0).sum(), states)
    torch.testing.assert_close(states.grad, wanted, atol=1e-5, rtol=1e-5)


def test_huge_logits_stay_finite(targets):
    states = leaf(random(T, H, seed=1) * 1e4)
    logp, entropy = chosen_logp(Projection(random(V, H, seed=2)), states, targets, 1.0, max_logits=4 * V)
    (logp + entropy).sum().backward()
    assert torch.isfinite(logp).all()
    assert torch.isfinite(states.grad).all()
    assert (entropy >= 0).all()


def test_no_rows_give_an_empty_result_with_a_graph():
    states, weight = leaf(torch.zeros(0, H)), leaf(random(V, H))
    logp, _ = chosen_logp(Projection(weight), states, torch.zeros(0, dtype=torch.int64), 1.0)
    logp.sum().backward()
    assert logp.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros(V, H))


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation gives back, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_tokens_times_vocabulary_is_never_held():
    rows, vocabulary = 400, 301
    targets = torch.zeros(rows, dtype=torch.int64)
    sizes = []
    for chunked in (True, False):
        states, weight = leaf(random(rows, 4)), leaf(random(vocabulary, 4))
        with _Largest() as largest:
            logp = (
                chosen_logp(Projection(weight), states, targets, 0.9, max_logits=10 * vocabulary)[0]
                if chunked
                else token_logp(Projection(weight).logits(states), targets, 0.9)
            )
            logp.sum().backward()
        sizes.append(largest.elements)
    assert sizes[0] == rows * (10 * vocabulary // rows)  # and the gradient of the weights, which is smaller
    assert sizes[1] == rows * vocabulary


@pytest.mark.parametrize("max_logits", CUTS)
def test_log_probabilities_of_several_tokens(max_logits):
    states, projection = random(T, H, seed=1), Projection(random(V, H, seed=2), random(V, seed=6), 0.5, 4.0)
    ids = torch.randint(V, (T, 5), generator=torch.Generator().manual_seed(9))
    wanted = torch.log_softmax(projection.logits(states) / 0.7, dim=-1).gather(-1, ids)
    torch.testing.assert_close(logp_at(projection, states, ids, 0.7, max_logits), wanted, atol=1e-5, rtol=1e-5)


# --- recorded supports -------------------------------------------------------------------------------------------


def ragged(targets: Tensor) -> list[list[int]]:
    """A random set for each position with its target in it: of one token, of a few, of all."""
    generator = torch.Generator().manual_seed(7)
    sets = []
    for position, target in enumerate(targets.tolist()):
        size = (1, 2, 7, V)[position % 4]
        others = [int(token) for token in torch.randperm(V, generator=generator) if token != target]
        sets.append([*others[: size - 1], target])
    return sets


def support_of(sets: list[list[int]]) -> Support:
    flat = torch.tensor([token for tokens in sets for token in tokens])
    return Support(flat, torch.tensor([len(tokens) for tokens in sets]))


@pytest.mark.parametrize("max_logits", CUTS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_softmax_over_a_recorded_support_is_that_of_brute_force(softcap, max_logits, targets):
    """Eq. 50 position by position with Python sets: logits outside are not in the sum, and get no gradient."""
    sets, coefficients = ragged(targets), random(T, seed=3)
    states, weight = leaf(random(T, H, seed=1)), leaf(random(V, H, seed=2))
    logits = Projection(weight, softcap=softcap).logits(states) / 0.8
    brute_logp, brute_entropy = [], []
    for position, tokens in enumerate(sets):
        log_p = torch.log_softmax(logits[position, tokens], dim=-1)
        brute_logp.append(log_p[tokens.index(int(targets[position]))])
        brute_entropy.append(-(log_p.exp() * log_p).sum())
    wanted, entropy = torch.stack(brute_logp), torch.stack(brute_entropy)
    (wanted * coefficients + entropy).sum().backward()

    own_states, own_weight = leaf(random(T, H, seed=1)), leaf(random(V, H, seed=2))
    found, found_entropy = chosen_logp(
        Projection(own_weight, softcap=softcap),
        own_states,
        targets,
        0.8,
        support=support_of(sets),
        max_logits=max_logits,
    )
    (found * coefficients + found_entropy).sum().backward()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_states.grad, states.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_weight.grad, weight.grad, atol=1e-5, rtol=1e-5)
    alone = [len(tokens) == 1 for tokens in sets]
    assert (found[alone] == 0).all()  # a set of one token leaves no choice


def test_a_support_of_the_whole_vocabulary_changes_nothing(targets):
    projection, states = Projection(random(V, H, seed=2)), random(T, H, seed=1)
    everything = Support(torch.arange(V).repeat(T), torch.full((T,), V))
    with_support = chosen_logp(projection, states, targets, 0.8, support=everything, max_logits=4 * V)
    without = chosen_logp(projection, states, targets, 0.8, max_logits=4 * V)
    torch.testing.assert_close(with_support, without, atol=0, rtol=0)


def test_a_support_that_does_not_fit_its_tokens_is_refused(targets):
    projection, states = Projection(random(V, H)), random(T, H)
    sets = ragged(targets)
    lacking = [*sets[:4], [(int(targets[4]) + 1) % V], *sets[5:]]
    with pytest.raises(EngineError, match=rf"sampled token 4 of the batch, id {int(targets[4])}, is not in"):
        chosen_logp(projection, states, targets, 1.0, support=support_of(lacking))
    with pytest.raises(EngineError, match="one set for each sampled token"):
        chosen_logp(projection, states, targets, 1.0, support=support_of(sets[1:]))
    empty = Support(support_of(sets).token_ids[1:], support_of([[], *sets[1:]]).lengths)
    with pytest.raises(EngineError, match="sampled token 0"):
        chosen_logp(projection, states, targets, 1.0, support=empty)
