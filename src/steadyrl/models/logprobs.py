"""Log-probabilities of chosen tokens, in float32, from logits or straight from the last hidden states.

`token_logp` takes logits that exist. `chosen_logp` makes them a few rows at a time and throws them away, in the
backward pass too: of tokens x vocabulary only `MAX_LOGITS` numbers are ever held. The backward pass makes each
row's logits a second time, which is one matrix product more than keeping them.
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
        max_logits: how many logits to hold at once.

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
    """Log-probabilities of several tokens at each position, without gradient and in chunks.

    Args:
        states: [T, H].
        token_ids: [T, K] int64.

    Returns:
        [T, K] float32.
    """
    logp = torch.empty(token_ids.shape, device=states.device)
    buffers = _Buffers(projection, len(states), max_logits)
    for rows in buffers.chunks():
        z = buffers.logits(states[rows], temperature)
        logp[rows] = z.gather(-1, token_ids[rows]) - _log_norm(z, buffers.spare[: len(z)]).unsqueeze(-1)
    return logp


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
        logp = torch.empty(len(states), device=states.device)
        log_norm, entropy = torch.empty_like(logp), torch.empty_like(logp)
        buffers = _Buffers(projection, len(states), max_logits)
        for rows in buffers.chunks():
            z = buffers.logits(states[rows], temperature)
            _restrict(z, support, rows)
            spare = buffers.spare[: len(z)]
            log_norm[rows] = _log_norm(z, spare)
            z -= log_norm[rows].unsqueeze(-1)
            logp[rows] = z.gather(-1, target_ids[rows].unsqueeze(-1)).squeeze(-1)
            entropy[rows] = -torch.exp(z, out=spare).mul_(z).sum(dim=-1)
        ctx.save_for_backward(states, weight, bias, target_ids, log_norm, entropy)
        ctx.settings = (projection.scale, projection.softcap, temperature, support, max_logits)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore (by position)
        states, weight, bias, target_ids, log_norm, entropy = ctx.saved_tensors
        scale, softcap, temperature, support, max_logits = ctx.settings
        logp_grad, entropy_grad = gradients
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        states_grad = torch.empty_like(states) if wants_states else None
        # sums over the chunks are float32, whatever the dtype of the weights
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros(len(weight), device=weight.device) if wants_bias else None
        buffers = _Buffers(Projection(weight, bias, scale, softcap), len(states), max_logits)
        for rows in buffers.chunks():
            z = buffers.logits(states[rows], temperature)
            _restrict(z, support, rows)
            z -= log_norm[rows].unsqueeze(-1)
            z_grad = _gradient(z, buffers.spare[: len(z)], logp_grad, entropy_grad, entropy, target_ids, rows)
            if softcap is not None:
                z_grad *= buffers.slope[: len(z)]
            z_grad *= scale / temperature
            if bias_grad is not None:
                bias_grad += z_grad.sum(dim=0)
            z_grad = buffers.as_weight(z_grad)
            if states_grad is not None:
                torch.mm(z_grad, weight, out=states_grad[rows])
            if weight_grad is not None:
                _add_product(weight_grad, z_grad.t(), states[rows])
        cast_weight = None if weight_grad is None else weight_grad.to(weight.dtype)
        cast_bias = None if bias_grad is None else bias_grad.to(weight.dtype)
        return states_grad, cast_weight, cast_bias, None, None, None, None, None


class _Buffers:
    """Room for the logits of a chunk. It is used again and again: on a CPU, fresh pages for every chunk would cost
    as much as a matrix product."""

    def __init__(self, projection: Projection, num_rows: int, max_logits: int) -> None:
        self._projection = projection
        self._num_rows = num_rows
        self._size = max(1, min(num_rows, max_logits // projection.vocabulary))
        shape, weight = (self._size, projection.vocabulary), projection.weight
        self._z = torch.empty(shape, device=weight.device)
        self.spare = torch.empty_like(self._z)
        self.slope = torch.empty_like(self._z) if projection.softcap is not None else self.spare
        self._low = None if weight.dtype == torch.float32 else torch.empty_like(self._z, dtype=weight.dtype)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self._num_rows, self._size):
            yield slice(start, min(start + self._size, self._num_rows))

    def logits(self, states: Tensor, temperature: float) -> Tensor:
        """Logits [c, V] float32 over the temperature; `slope` becomes the derivative of the soft-cap, 1 - tanh^2."""
        weight, bias = self._projection.weight, self._projection.bias
        scale, softcap = self._projection.scale, self._projection.softcap
        z = self._z[: len(states)]
        product = z if self._low is None else self._low[: len(states)]
        if bias is None:
            torch.mm(states, weight.t(), out=product)
        else:
            torch.addmm(bias, states, weight.t(), out=product)
        if self._low is not None:
            z.copy_(product)
        if scale != 1.0:
            z *= scale
        if softcap is not None:
            slope = self.slope[: len(states)]
            torch.square(z.div_(softcap).tanh_(), out=slope)
            slope.neg_().add_(1.0)
            z *= softcap
        if temperature != 1.0:
            z /= temperature
        return z

    def as_weight(self, gradient: Tensor) -> Tensor:
        """The gradient in the dtype of the weights."""
        return gradient if self._low is None else self._low[: len(gradient)].copy_(gradient)


def _log_norm(z: Tensor, spare: Tensor) -> Tensor:
    """logsumexp [c] of z [c, V], with the temporary in `spare`."""
    largest = z.amax(dim=-1, keepdim=True)
    total = torch.sub(z, largest, out=spare).exp_().sum(dim=-1)
    return total.log_().add_(largest.squeeze(-1))


def _restrict(z: Tensor, support: Support | None, rows: slice) -> None:
    """Move every logit outside the support out of the softmax, in place."""
    if support is None:
        return
    lengths = support.lengths[rows]
    first = int(support.lengths[: rows.start].sum())
    row = torch.arange(len(lengths), device=z.device).repeat_interleave(lengths)
    outside = torch.ones_like(z, dtype=torch.bool)
    outside[row, support.token_ids[first : first + len(row)]] = False
    z.masked_fill_(outside, OUTSIDE)


def _gradient(
    log_p: Tensor,
    spare: Tensor,
    logp_grad: Tensor | None,
    entropy_grad: Tensor | None,
    entropy: Tensor,
    target_ids: Tensor,
    rows: slice,
) -> Tensor:
    """Gradient [c, V] of the logits over the temperature, in the memory of `log_p` or of `spare`."""
    gradient = torch.exp(log_p, out=spare)
    if entropy_grad is not None:
        log_p.add_(entropy[rows].unsqueeze(-1)).mul_(-entropy_grad[rows].unsqueeze(-1))
        if logp_grad is not None:
            log_p -= logp_grad[rows].unsqueeze(-1)
        gradient *= log_p
    else:
        assert logp_grad is not None, "the backward pass of an output that nothing uses"
        gradient *= -logp_grad[rows].unsqueeze(-1)
    if logp_grad is not None:
        gradient.scatter_add_(-1, target_ids[rows].unsqueeze(-1), logp_grad[rows].unsqueeze(-1))
    return gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] float32 += left [V, c] @ right [c, H]."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
