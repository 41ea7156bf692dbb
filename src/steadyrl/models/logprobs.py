"""Log-probabilities of chosen tokens, in float32, from logits or straight from the last hidden states.

`token_logp` takes logits that exist. `chosen_logp` makes them for a block of the vocabulary at a time and throws them
away, in the backward pass too: of tokens x vocabulary only `MAX_LOGITS` numbers are ever held. The backward pass makes
the logits a second time, which is one matrix product more than keeping them. Blocks of the vocabulary, and not of the
tokens: each row of the output matrix is then read once a pass, and its gradient is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steadyrl.errors import EngineError

MAX_LOGITS = 2**25  # held at once: 128 MiB in float32, of which two or three buffers are alive together
OUTSIDE = -1e30  # logit of a token outside the support: its probability is 0, and 0 * OUTSIDE is a number


def token_logp(logits: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, in float32 whatever the model's dtype.

    Args:
        logits: [..., V].
        target_ids: [...] int64.
        temperature: the one that the tokens were sampled with; trainer and engine must agree on it.

    Returns:
        [...] float32, with gradient through `logits`.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


@dataclass(frozen=True)
class Projection:
    """How a model turns hidden states [T, H] into logits [T, V]: z = scale * (states @ weight^T + bias), then
    softcap * tanh(z / softcap) where there is a softcap."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def logits(self, states: Tensor) -> Tensor:
        """[T, V] float32, with gradient; the matrix product is in the dtype of the states, as in the model."""
        z = torch.nn.functional.linear(states, self.weight, self.bias).float()
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


@dataclass(frozen=True)
class Support:
    """The tokens that could have been sampled at each position, as top-p or top-k left them.

    `token_ids` holds the set of position 0, then that of position 1, and so on; `lengths[t]` is the size of the
    set at position t.
    """

    token_ids: Tensor  # [sum of lengths] int64
    lengths: Tensor  # [T] int64

    def check(self, target_ids: Tensor) -> None:
        """Raises EngineError unless every set holds the token that was sampled from it."""
        if int(self.lengths.sum()) != len(self.token_ids) or self.lengths.shape != target_ids.shape:
            raise EngineError(
                f"the recorded supports hold {len(self.token_ids)} token ids for {len(target_ids)} sampled tokens, and "
                f"their lengths name {int(self.lengths.sum())} ids for {len(self.lengths)}: the engine must report one "
                "set for each sampled token"
            )
        position = torch.arange(len(target_ids), device=target_ids.device).repeat_interleave(self.lengths)
        holds = torch.zeros_like(target_ids, dtype=torch.bool)
        holds[position[self.token_ids == target_ids[position]]] = True
        if not bool(holds.all()):
            first = int((~holds).nonzero()[0])
            raise EngineError(
                f"sampled token {first} of the batch, id {int(target_ids[first])}, is not in its recorded support: the "
                "engine must report the set that was really sampled from"
            )


def chosen_logp(
    projection: Projection,
    states: Tensor,
    target_ids: Tensor,
    temperature: float,
    *,
    support: Support | None = None,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy of the distribution, without tokens x vocabulary in memory.

    The same numbers as `token_logp(projection.logits(states), ...)` up to float rounding. With a support the
    softmax runs over the recorded set alone (SAT paper, eq. 50): log pi(y) = z_y / T - log sum_{v in set} e^{z_v / T}.

    Args:
        projection: how the model makes logits. Gradients reach its weight and bias where they want one.
        states: [T, H], in the dtype of `projection.weight`.
        target_ids: [T] int64.
        temperature: the one that the tokens were sampled with.
        support: what the targets were sampled from; None is the whole vocabulary.
        max_logits: how many logits to hold at once; at least one for each token.

    Returns:
        Log-probability [T] and entropy [T] in nats, both float32 with gradient. Each costs the backward pass
        only where the loss uses it.

    Raises:
        EngineError: a support that does not hold its target.
    """
    if support is not None:
        support.check(target_ids)
    return _ChosenLogp.apply(
        states, projection.weight, projection.bias, projection, target_ids, temperature, support, max_logits
    )


@torch.no_grad()
def logp_at(
    projection: Projection, states: Tensor, token_ids: Tensor, temperature: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Log-probabilities of several tokens at each position, without gradient and in blocks.

    Args:
        states: [T, H].
        token_ids: [T, K] int64.

    Returns:
        [T, K] float32.
    """
    softmax = _Softmax(len(states), states.device)
    z_at = torch.empty(token_ids.shape, device=states.device)
    blocks = _Blocks(projection, len(states), max_logits)
    for block in blocks:
        z = blocks.logits(states, block, temperature)
        row, column = _inside(token_ids, block).nonzero(as_tuple=True)
        z_at[row, column] = z[row, token_ids[row, column] - block.start]
        softmax.add(z, blocks.spare)
    return z_at - softmax.log_norm.unsqueeze(-1)


class _ChosenLogp(torch.autograd.Function):
    """`chosen_logp` with its own backward pass.

    With p = softmax(z) and entropy H: d logp / d z_v = [v = target] - p_v and d H / d z_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        target_ids: Tensor,
        temperature: float,
        support: Support | None,
        max_logits: int,
    ) -> tuple[Tensor, Tensor]:
        softmax = _Softmax(len(states), states.device)
        chosen = torch.empty(len(states), device=states.device)
        blocks = _Blocks(projection, len(states), max_logits)
        for block in blocks:
            z = blocks.logits(states, block, temperature)
            _restrict(z, support, block)
            row = _inside(target_ids, block).nonzero().squeeze(1)
            chosen[row] = z[row, target_ids[row] - block.start]
            softmax.add(z, blocks.spare)
        log_norm, entropy = softmax.log_norm, softmax.entropy
        ctx.save_for_backward(states, weight, bias, target_ids, log_norm, entropy)
        ctx.settings = (projection.scale, projection.softcap, temperature, support, max_logits)
        ctx.set_materialize_grads(False)
        return chosen - log_norm, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore (by position)
        states, weight, bias, target_ids, log_norm, entropy = ctx.saved_tensors
        scale, softcap, temperature, support, max_logits = ctx.settings
        logp_grad, entropy_grad = gradients
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # a sum over the blocks is float32, whatever the dtype of the weights
        states_grad = torch.zeros_like(states, dtype=torch.float32) if wants_states else None
        weight_grad = torch.empty_like(weight) if wants_weight else None
        bias_grad = torch.empty_like(bias) if wants_bias else None
        blocks = _Blocks(Projection(weight, bias, scale, softcap), len(states), max_logits)
        for block in blocks:
            log_p = blocks.logits(states, block, temperature)
            _restrict(log_p, support, block)
            log_p -= log_norm.unsqueeze(-1)
            z_grad = _gradient(log_p, blocks.spare, logp_grad, entropy_grad, entropy)
            if logp_grad is not None:
                row = _inside(target_ids, block).nonzero().squeeze(1)
                z_grad[row, target_ids[row] - block.start] += logp_grad[row]
            if softcap is not None:
                z_grad *= blocks.slope
            if scale != temperature:
                z_grad *= scale / temperature
            if bias_grad is not None:
                bias_grad[block] = z_grad.sum(dim=0)
            z_grad = blocks.as_weight(z_grad)
            if weight_grad is not None:
                torch.mm(z_grad.t(), states, out=weight_grad[block])
            if states_grad is not None:
                _add_product(states_grad, z_grad, weight[block])
        cast_states = None if states_grad is None else states_grad.to(states.dtype)
        return cast_states, weight_grad, bias_grad, None, None, None, None, None


class _Softmax:
    """Normalizer and entropy of rows of logits that arrive a block at a time."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._largest = torch.full((num_rows,), OUTSIDE, device=device)
        self._total = torch.zeros(num_rows, device=device)  # sum of e^(z - largest)
        self._moment = torch.zeros(num_rows, device=device)  # sum of (z - largest) e^(z - largest)

    def add(self, z: Tensor, spare: Tensor) -> None:
        """Take in a block [T, v]; `z` and `spare` are used up."""
        largest = torch.maximum(self._largest, z.amax(dim=-1))
        shift = self._largest - largest
        shrink = shift.exp()
        self._moment = (self._moment + shift * self._total) * shrink
        self._total = self._total * shrink
        self._largest = largest
        z -= largest.unsqueeze(-1)
        exp = torch.exp(z, out=spare)
        self._total += exp.sum(dim=-1)
        self._moment += exp.mul_(z).sum(dim=-1)

    @property
    def log_norm(self) -> Tensor:
        return self._largest + self._total.log()

    @property
    def entropy(self) -> Tensor:
        return self._total.log() - self._moment / self._total


class _Blocks:
    """The vocabulary in blocks, and room for the logits of one. It is used again and again: on a CPU, fresh pages for
    every block would cost as much as a matrix product."""

    def __init__(self, projection: Projection, num_rows: int, max_logits: int) -> None:
        self._projection = projection
        self._width = min(projection.vocabulary, max(1, max_logits // max(1, num_rows)))
        shape, weight = (num_rows, self._width), projection.weight
        self._z = torch.empty(shape, device=weight.device)
        self._spare = torch.empty_like(self._z)
        self._slope = torch.empty_like(self._z) if projection.softcap is not None else self._spare
        self._low = None if weight.dtype == torch.float32 else torch.empty_like(self._z, dtype=weight.dtype)
        self._now = self._width  # of the block in work: the last one is narrower

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self._projection.vocabulary, self._width):
            yield slice(start, min(start + self._width, self._projection.vocabulary))

    @property
    def spare(self) -> Tensor:
        return self._shaped(self._spare)

    @property
    def slope(self) -> Tensor:
        """Derivative of the soft-cap at the logits that were made last, 1 - tanh^2."""
        return self._shaped(self._slope)

    def logits(self, states: Tensor, block: slice, temperature: float) -> Tensor:
        """Logits [T, v] float32 of a block, over the temperature."""
        weight, bias = self._projection.weight[block], self._projection.bias
        scale, softcap = self._projection.scale, self._projection.softcap
        self._now = len(weight)
        z = self._shaped(self._z)
        product = z if self._low is None else self._shaped(self._low)
        if bias is None:
            torch.mm(states, weight.t(), out=product)
        else:
            torch.addmm(bias[block], states, weight.t(), out=product)
        if self._low is not None:
            z.copy_(product)
        if scale != 1.0:
            z *= scale
        if softcap is not None:
            torch.square(z.div_(softcap).tanh_(), out=self.slope)
            self.slope.neg_().add_(1.0)
            z *= softcap
        if temperature != 1.0:
            z /= temperature
        return z

    def as_weight(self, gradient: Tensor) -> Tensor:
        """The gradient in the dtype of the weights."""
        return gradient if self._low is None else self._shaped(self._low).copy_(gradient)

    def _shaped(self, buffer: Tensor) -> Tensor:
        """[T, v] in the first elements of a buffer."""
        num_rows = len(buffer)
        return buffer.view(-1)[: num_rows * self._now].view(num_rows, self._now)


def _inside(token_ids: Tensor, block: slice) -> Tensor:
    """Which of the tokens are in a block of the vocabulary."""
    return (token_ids >= block.start) & (token_ids < block.stop)


def _restrict(z: Tensor, support: Support | None, block: slice) -> None:
    """Move every logit outside the support out of the softmax, in place."""
    if support is None:
        return
    inside = _inside(support.token_ids, block)
    row = torch.arange(len(z), device=z.device).repeat_interleave(support.lengths)[inside]
    outside = torch.ones_like(z, dtype=torch.bool)
    outside[row, support.token_ids[inside] - block.start] = False
    z.masked_fill_(outside, OUTSIDE)


def _gradient(
    log_p: Tensor, spare: Tensor, logp_grad: Tensor | None, entropy_grad: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient [T, v] of the logits over the temperature but for the target's own term; uses up `log_p`."""
    gradient = torch.exp(log_p, out=spare)
    if entropy_grad is None:
        assert logp_grad is not None, "the backward pass of an output that nothing uses"
        return gradient.mul_(-logp_grad.unsqueeze(-1))
    log_p.add_(entropy.unsqueeze(-1)).mul_(-entropy_grad.unsqueeze(-1))
    if logp_grad is not None:
        log_p -= logp_grad.unsqueeze(-1)
    return gradient.mul_(log_p)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [T, H] float32 += left [T, v] @ right [v, H]."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
