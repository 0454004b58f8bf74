"""Parts of a decoder between its matrix products, each with a first and a second derivative of its own.

    rms_norm   y = w x r,   r = 1 / sqrt(mean x^2 + eps)                                                       (S11)
    swiglu     y = silu(g) u,   [g, u] = x                                                                     (S12)
    rotate     y = x cos + [-x_2, x_1] sin                                                                     (S13)
    cross_entropy   l_t = log sum_a exp z_ta - z_t,i(t)                                                        (S14)

Written in plain torch, each pass of such a chain of small operations saves what it multiplied, and differentiated twice it saves that again: the norm
alone some ten tensors. Here a first derivative saves what it was given and the cotangent, and the rest is computed again from those.
Third derivatives are refused. The plain forms are the definitions, in tests/test_pointwise.py.

Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; Shazeer 2020, arXiv:2002.05202, equation 6; Su et al. 2021, arXiv:2104.09864,
equation 34; the derivatives are ours, checked against autograd of the plain forms.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from graven.errors import OrderError, ShapeError
from graven.shapes import check


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, "D"], *, epsilon: float) -> Float[Tensor, "*B D"]:
    """Vectors at a root mean square of 1, times a weight an entry.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4, with an epsilon under the root as in Llama; equation S11.
    """
    check(weight=(weight, f"{x.shape[-1]}"))
    wide = torch.promote_types(x.dtype, torch.float32)
    return _Norm.apply(x.to(wide), weight.to(wide), epsilon).to(x.dtype)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def swiglu(x: Float[Tensor, "*B E"]) -> Float[Tensor, "*B F"]:
    """silu(first half) * second half; F = E / 2.

    Raises:
        ShapeError: E is odd.
    Source: Shazeer 2020, arXiv:2002.05202, equation 6; equation S12.
    """
    if x.shape[-1] % 2:
        raise ShapeError(f"`x` has shape {list(x.shape)}, whose last axis has no two halves; give an even number of features.")
    return _SwiGLU.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def rotate(x: Float[Tensor, "B H T K"], rotation: tuple[Float[Tensor, "#B 1 T K"], Float[Tensor, "#B 1 T K"]]) -> Float[Tensor, "B H T K"]:
    """Rotary positions on queries or keys; both halves of the cosines are equal, and so are those of the sines.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34; equation S13.
    """
    return _Rotate.apply(x, *rotation)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def cross_entropy(logits: Float[Tensor, "B A"], ids: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """-log softmax(logits) at one index a row, in nats.

    Source: equation S14.
    """
    check(logits=(logits, "B A"), ids=(ids, "B"))
    losses, _ = _CrossEntropy.apply(logits, ids)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return losses


def _refuse(name: str) -> None:
    raise OrderError(f"`{name}` has a first and a second derivative, and a third was asked for.")


def _mean(x: Tensor, y: Tensor) -> Tensor:
    """mean(x * y) of each vector."""
    return torch.linalg.vecdot(x, y)[..., None] / x.shape[-1]


class _Norm(torch.autograd.Function):
    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        r = (_mean(x, x) + epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return (*_NormGradient.apply(*ctx.saved_tensors, d_y, ctx.needs_input_grad[1]), None)  # type: ignore[no-untyped-call]


class _NormGradient(torch.autograd.Function):
    """With h = x r and u = w dy: dx = r (u - h mean(u h)), dw = sum over vectors of dy h."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, r: Tensor, d_y: Tensor, of_weight: bool) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight, r, d_y)
        ctx.set_materialize_grads(False)
        h, u = x * r, d_y * weight
        d_x = u.addcmul_(h, _mean(u, h), value=-1).mul_(r)
        return d_x, h.mul_(d_y).sum_to_size(weight.shape) if of_weight else None

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, c: Tensor | None) -> tuple[Tensor | None, ...]:
        """Cotangents a of dx and c of dw; r is a function of x here, so nothing goes through it apart."""
        if torch.is_grad_enabled():
            _refuse("rms_norm")
        x, weight, r, d_y = ctx.saved_tensors
        h = x * r
        g_d_y, g_weight, z, rest = torch.zeros_like(x), None, torch.zeros_like(x), torch.zeros_like(r)
        if a is not None:
            u = d_y * weight
            p, q, m = _mean(a, h), _mean(a, u), _mean(u, h)
            z = (u * p).addcmul_(a, m).mul_(-r)
            rest = (q - p * m) * r
            g_d_y = torch.addcmul(a, h, p, value=-1).mul_(r)
            g_weight = (g_d_y * d_y).sum_to_size(weight.shape)
            g_d_y.mul_(weight)
        if c is not None:
            z.addcmul_(d_y, c)
            g_d_y.addcmul_(h, c)
        g_x = z.addcmul_(h, _mean(z, h) + rest, value=-1).mul_(r)
        return g_x, g_weight, None, g_d_y, None


class _SwiGLU(torch.autograd.Function):
    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        return _SwiGLUGradient.apply(*ctx.saved_tensors, d_y)  # type: ignore[no-untyped-call]


class _SwiGLUGradient(torch.autograd.Function):
    """With s = sigmoid(g) and f = silu: dg = dy u f', du = dy f;  f' = s + f (1 - s), f'' = s (1 - s) (2 + g (1 - 2 s)) = (1 - s) (s + f' - f s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, d_y: Tensor) -> Tensor:
        ctx.save_for_backward(x, d_y)
        gate, up = x.chunk(2, -1)
        s = gate.sigmoid()
        f = gate * s
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, -1)
        torch.mul(d_y, f, out=d_up)
        torch.addcmul(s, f, 1 - s, out=d_gate)
        d_gate.mul_(up).mul_(d_y)
        return d_x

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            _refuse("swiglu")
        x, d_y = ctx.saved_tensors
        (gate, up), (a_gate, a_up) = x.chunk(2, -1), a.chunk(2, -1)
        s = gate.sigmoid()
        f, rest = gate * s, 1 - s
        slope = torch.addcmul(s, f, rest)
        bend = torch.addcmul(slope, f, s, value=-1).add_(s).mul_(rest)
        g_x = torch.empty_like(x)
        g_gate, g_up = g_x.chunk(2, -1)
        slope_a = torch.mul(slope, a_gate, out=rest)
        torch.mul(slope_a, d_y, out=g_up)
        torch.mul(bend, a_gate, out=g_gate)
        g_gate.mul_(up).addcmul_(slope, a_up).mul_(d_y)
        return g_x, slope_a.mul_(up).addcmul_(f, a_up)


class _Rotate(torch.autograd.Function):
    """Linear in x: its transpose turns the other way, and so on in every order."""

    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        y = torch.mul(x, cos, out=torch.empty(x.shape, dtype=torch.result_type(x, cos), device=x.device))  # contiguous, as attention wants it
        y[..., :half].addcmul_(x[..., half:], sin[..., half:], value=-1)
        y[..., half:].addcmul_(x[..., :half], sin[..., :half])
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(d_y, cos, -sin), None, None  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, ids, total)
        ctx.mark_non_differentiable(total)
        return (total - logits.gather(-1, ids[:, None]))[:, 0], total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return _CrossEntropyGradient.apply(*ctx.saved_tensors, d_loss), None  # type: ignore[no-untyped-call]


class _CrossEntropyGradient(torch.autograd.Function):
    """dz = dl (p - e_i), p = softmax(z)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, total: Tensor, d_loss: Tensor) -> Tensor:
        ctx.save_for_backward(logits, ids, total, d_loss)
        d_logits = (logits - total).exp_().mul_(d_loss[:, None])
        return d_logits.scatter_add_(-1, ids[:, None], -d_loss[:, None])

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> tuple[Tensor, None, None, Tensor]:
        if torch.is_grad_enabled():
            _refuse("cross_entropy")
        logits, ids, total, d_loss = ctx.saved_tensors
        p = (logits - total).exp_()
        mean = torch.linalg.vecdot(p, a)[:, None]
        return p.mul_(a - mean).mul_(d_loss[:, None]), None, None, (mean - a.gather(-1, ids[:, None]))[:, 0]
