"""The output layer apart from the model: every family's log-probabilities, without its logits."""

from __future__ import annotations

import logging

import pytest
import torch
from models.families import DENSE, build
from torch import nn

from steadyrl.models import head as head_module
from steadyrl.models.head import LinearHead, WholeLogits, read_head
from steadyrl.models.logprobs import token_logp

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, 60, (14,), generator=torch.Generator().manual_seed(1))
TAILS = {"Gemma2": (1.0, 3.0), "Gemma3Text": (1.0, 2.0), "Granite": (0.125, None), "Cohere": (0.25, None)}
TAILS |= {"HyperCLOVAX": (2.0, None)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_a_family_s_log_probabilities_and_gradients(family, chunked, monkeypatch):
    """Oracle: the log-softmax of the logits that the model itself gives."""
    monkeypatch.setattr(head_module, "MAX_LOGITS", 0 if chunked else 10**9)
    model = build(family)
    head = read_head(model)
    assert isinstance(head, LinearHead)
    assert (head.scale, head.softcap) == TAILS.get(family, (1.0, None))

    wanted = token_logp(model(IDS).logits.flatten(0, 1), TARGETS, 0.7)
    wanted.pow(2).sum().backward()
    wanted_gradients = gradients(model)
    states = head.states(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    logp = head.logp(states.flatten(0, 1), TARGETS, 0.7)
    logp.pow(2).sum().backward()
    found_gradients = gradients(model)

    torch.testing.assert_close(logp, wanted, atol=1e-5, rtol=1e-5)
    assert found_gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_log_probabilities_of_several_tokens(family):
    model, ids = build(family), TARGETS.view(14, 1) + torch.tensor([0, 1, 2])
    head = read_head(model)
    with torch.no_grad():
        wanted = torch.log_softmax(model(IDS).logits.flatten(0, 1) / 0.7, dim=-1).gather(-1, ids)
        states = head.states(input_ids=IDS, attention_mask=torch.ones_like(IDS)).flatten(0, 1)
    torch.testing.assert_close(head.logp_at(states, ids, 0.7), wanted, atol=1e-5, rtol=1e-5)


def test_the_weights_of_the_moment_are_used():
    model = build("Llama")
    head = read_head(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
        states = head.states(input_ids=IDS, attention_mask=torch.ones_like(IDS)).flatten(0, 1)
        wanted = token_logp(model(IDS).logits.flatten(0, 1), TARGETS, 1.0)
    torch.testing.assert_close(head.logp(states, TARGETS, 1.0), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunked", [False, True])
def test_under_autocast_the_product_is_in_bfloat16_as_in_the_model(chunked, monkeypatch):
    monkeypatch.setattr(head_module, "MAX_LOGITS", 0 if chunked else 10**9)
    model = build("Llama")
    head = read_head(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = token_logp(model(IDS).logits.flatten(0, 1), TARGETS, 0.7)
        states = head.states(input_ids=IDS, attention_mask=torch.ones_like(IDS))
        logp = head.logp(states.flatten(0, 1), TARGETS, 0.7)
    torch.testing.assert_close(logp, wanted, atol=1e-5, rtol=1e-5)
    logp.sum().backward()
    assert model.get_output_embeddings().weight.grad.dtype == torch.float32


@pytest.mark.parametrize("what", ["an unknown tail", "an unknown layer"])
def test_a_model_that_cannot_be_read_keeps_its_logits(what, caplog):
    model = build("Llama")
    if what == "an unknown tail":
        model.register_forward_hook(lambda _m, _i, output: output.__setitem__("logits", output.logits * 1.1) or output)
    else:
        model.lm_head = nn.Sequential(model.lm_head, nn.ReLU())
    with caplog.at_level(logging.WARNING, logger="steadyrl"):
        head = read_head(model)
    assert isinstance(head, WholeLogits)
    assert "LlamaForCausalLM" in caplog.text
    states = head.states(input_ids=IDS, attention_mask=torch.ones_like(IDS)).flatten(0, 1)
    wanted = torch.log_softmax(model(IDS).logits.flatten(0, 1) / 0.7, dim=-1)
    torch.testing.assert_close(head.logp(states, TARGETS, 0.7), wanted[torch.arange(14), TARGETS])
    several = TARGETS.view(14, 1) + torch.tensor([0, 1])
    torch.testing.assert_close(head.logp_at(states, several, 0.7), wanted.gather(-1, several))
