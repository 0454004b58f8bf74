"""Softmax attention that can be differentiated twice, in memory linear in T.

    P = softmax(s Q K^T + mask),   O = P V                                   one such pair per head

The fused kernels of PyTorch have no double backward (pytorch#116350), and its other forms keep several T x S matrices a head. An inner gradient
step that is trained through needs both derivatives. Here they are written out and computed from q, k, v, the output and the logarithm of each
row's normaliser, a block of query rows at a time: nothing of size T x S is kept, and a block stays in the cache. With the scale s in Q and A,
`*` entrywise, rowsum a column, and A, B, C the cotangents of dQ, dK, dV:

    D = rowsum(dO * O)      X = dO V^T - D      dS = P * X                              dV = P^T dO    dQ = s dS K      dK = dS^T Q
    G = A K^T + Q B^T       E = P * G - rowsum(P * G) * P                               gdO = P C + E V                 gV = E^T dO
    w = rowsum(dO * gdO)    R = E * X + P * (dO C^T - w)                                gQ = s (dS B + R K)             gK = dS^T A + R^T Q

Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; grouped queries: Ainslie et al. 2023, arXiv:2305.13245; blocks of rows that are
computed anew: Dao et al. 2022, arXiv:2205.14135. The second derivative is ours: derived in docs/theory.md, tested in tests/test_attention.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from graven.errors import OrderError, ShapeError, SpecError
from graven.shapes import check

ROWS = 128  # query rows of a block: fewer starve the matrix products, more waste the triangle that `causal` hides
BLOCK = 2**18  # entries of a block of the T x S matrix: the four that are held at a time fit in the cache of a core


def attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Float[Tensor, "B H T V"]:
    """Attention of T queries over S keys, exact in value, first and second derivative.

    Args:
        q: Queries, H heads.
        k: Keys, G heads; G divides H, and query head h reads key head h // (H / G).
        v: Values, G heads.
        mask: True where a query may see a key, broadcastable to [B, H, T, S]; joined with `causal`.
        causal: Query t sees key s only if s <= t + S - T: the last query sees every key.
        scale: Factor on the logits, 1 / sqrt(K) where it is left out.
    Returns:
        In the dtype of `q`, computed in float32 or wider. A row that may see nothing is 0, and so are its gradients.
    Raises:
        ShapeError: The parts do not fit each other, or G does not divide H.
        SpecError: `mask` is not boolean.
        OrderError: Later, where a third derivative is asked for.
    Source: Vaswani et al. 2017, equation 1.
    """
    groups = _check_arguments(q, k, v, mask)
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(wide).reshape(q.shape[0] * groups, q.shape[1] // groups, *q.shape[2:])  # the heads of a group are rows against the same keys
    keys, values = (x.to(wide).flatten(0, 1) for x in (k, v))
    setting = Setting(groups, causal, q.shape[3] ** -0.5 if scale is None else scale)
    o, _ = _Value.apply(rows, keys, values, mask, setting)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return o.reshape(*q.shape[:3], v.shape[3]).to(q.dtype)


def plain_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T V"]:
    """The definition, which forms the T x S matrix of every head and can be differentiated any number of times.

    Args:
        softcap: Logits become softcap * tanh(logits / softcap), as in Gemma 2; the others as of `attention`.
    Returns:
        As `attention`, in the dtype of its parts throughout.
    Raises:
        ShapeError, SpecError: As `attention`.
    Source: Vaswani et al. 2017, equation 1; Gemma Team 2024, arXiv:2408.00118, section 2 (softcap).
    """
    groups = _check_arguments(q, k, v, mask)
    k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    logits = (q * (q.shape[3] ** -0.5 if scale is None else scale)) @ k.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if mask is not None:
        seen = seen & mask
    # A finite fill, not -inf: a row of -inf is NaN in the forward and in both backwards, even where it is masked out afterwards.
    weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> int:
    """The number of key heads."""
    sizes = check(q=(q, "B H T K"), k=(k, "B G S K"), v=(v, "B G S V"))
    heads, groups, whole = sizes["H"], sizes["G"], tuple(sizes[axis] for axis in "BHTS")
    if heads % groups:
        raise ShapeError(f"`q` has {heads} heads and `k` has {groups}; the second must divide the first. Repeat or drop key heads.")
    if mask is None:
        return groups
    if mask.dtype != torch.bool:
        raise SpecError(f"`mask` is {mask.dtype}; it must be torch.bool, True where a query may see a key. Pass `mask == 0` for an additive mask.")
    if mask.dim() > 4 or any(size not in (1, full) for size, full in zip(reversed(mask.shape), reversed(whole), strict=False)):
        raise ShapeError(f"`mask` has shape {tuple(mask.shape)}; it must broadcast to [B, H, T, S] = {whole}. Insert axes of size 1.")
    return groups


@dataclass(frozen=True)
class Setting:
    """What all derivatives share.

    Args:
        groups: Key heads of each row of the batch, G: pair n is key head n % G of row n // G.
        causal: As `attention`.
        scale: Factor on the logits.
    """

    groups: int
    causal: bool
    scale: float

    @property
    def binary(self) -> float:
        """Factor on the logits for powers of two, which take half the time of powers of e."""
        return self.scale / math.log(2)


@dataclass(frozen=True)
class Block:
    """Some rows of the T x S matrix of some pairs of a key head and a row of the batch.

    Args:
        rows: Queries.
        columns: Keys that at least one of them may see.
        biases: 0 where a query may see a key and -inf where not, each broadcastable to [pairs, R, rows, last columns]; columns before are seen.
    """

    rows: slice
    columns: slice
    biases: tuple[Tensor, ...] = ()

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    def of(self, x: Tensor) -> Tensor:
        """The block's rows of [pairs, R, T, K], as [pairs, R * rows, K]."""
        return x[:, :, self.rows].reshape(len(x), -1, x.shape[3])

    def put(self, value: Tensor, *, into: Tensor) -> None:
        """The counterpart of `of`."""
        into[:, :, self.rows] = value.view(len(into), into.shape[1], -1, into.shape[3])

    def logits(self, rows: Tensor, keys: Tensor, *, out: Tensor) -> Tensor:
        """Products of rows and keys, -inf where a row may not see."""
        torch.bmm(rows, keys.mT, out=out)
        for bias in self.biases:
            out.view(len(out), -1, self.height, self.width)[..., -bias.shape[-1] :].add_(bias)
        return out


class _Value(Function):
    """O, and the binary logarithm of every row's normaliser."""

    twice_differentiable = True  # read by `check_twice_differentiable`

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, setting: Setting) -> tuple[Tensor, Tensor]:
        return _fused_value(q, k, v, setting) if mask is None and _is_fused(q, k, v, setting) else _value(q, k, v, mask, setting)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, mask, ctx.setting = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, mask)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, log, mask = ctx.saved_tensors
        d = _Gradient.apply(d_o, q, k, v, o.detach(), log, mask, ctx.setting)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return *d, None, None


def _value(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, setting: Setting) -> tuple[Tensor, Tensor]:
    """O, and the binary logarithm of every row's normaliser, a block at a time."""
    o, log = q.new_zeros(*q.shape[:3], v.shape[2]), q.new_zeros(*q.shape[:3], 1)
    for pairs, blocks in _slabs(q, k, mask, setting, buffers=1):
        left, right, values = q[pairs] * setting.binary, k[pairs].contiguous(), v[pairs].contiguous()
        for block, (weights,) in blocks:
            block.logits(block.of(left), right[:, block.columns], out=weights)
            top = weights.amax(-1, keepdim=True)
            top.masked_fill_(top == -torch.inf, 0.0)
            weights.sub_(top).exp2_()
            total = weights.sum(-1, keepdim=True).clamp_(min=1.0)  # the largest logit alone gives 1; a row that sees nothing has none
            block.put(_product(weights, values[:, block.columns]).div_(total), into=o[pairs])
            block.put(total.log2_().add_(top), into=log[pairs])
    return o, log


def _is_fused(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> bool:
    """Whether PyTorch has one kernel for it: on the processor, without a mask, `causal` from the first key on.

    It divides by zero where there is nothing, and its -inf are hidden before they are scaled.
    """
    square = not setting.causal or q.shape[2] == k.shape[1]
    return q.device.type == "cpu" and square and q.shape[3] == v.shape[2] and min(q.numel(), k.numel()) > 0 and setting.scale > 0


def _fused_value(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """The same by the kernel of PyTorch, in about two thirds of the time. Its backward is no faster than ours and has no derivative."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # it takes the last axis for dense without a look
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    o, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, setting.causal, scale=setting.scale)
    return o, log[..., None] / math.log(2)


class _Gradient(Function):
    """dQ, dK and dV."""

    @staticmethod
    def forward(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log: Tensor, mask: Tensor | None, setting: Setting) -> tuple[Tensor, ...]:
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for pairs, blocks in _slabs(q, k, mask, setting, buffers=2):
            left, d_left = _left(q[pairs] * setting.binary, log[pairs]), _less_mean(d_o[pairs], o[pairs])
            right, values = _right(k[pairs]), _right(v[pairs])
            for block, (weights, x) in blocks:
                rows, d_rows, keys = block.of(left), block.of(d_left), right[:, block.columns]
                _weights(block, rows, keys, out=weights)
                torch.bmm(d_rows, values[:, block.columns].mT, out=x).mul_(weights)
                d_v[pairs, block.columns].baddbmm_(weights.mT, d_rows[..., :-1])
                d_k[pairs, block.columns].baddbmm_(x.mT, rows[..., :-1])
                block.put(_product(x, keys[..., :-1]), into=d_q[pairs])
        return d_q.mul_(setting.scale), d_k.mul_(math.log(2)), d_v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        *tensors, ctx.setting = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor | None, ...]:
        g = _SecondGradient.apply(a, b, c, *ctx.saved_tensors, ctx.setting)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return *g, None, None, None, None


class _SecondGradient(Function):
    """gdO, gQ, gK and gV."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        o, log, mask, setting = rest
        g_d_o, g_q, g_k, g_v = (torch.zeros_like(x) for x in (d_o, q, k, v))
        width = q.shape[3]
        for pairs, blocks in _slabs(q, k, mask, setting, buffers=4):
            left, right = _left(q[pairs] * setting.binary, log[pairs]), _right(k[pairs])
            aq, kb = torch.cat([a[pairs], q[pairs]], -1) * setting.scale, torch.cat([k[pairs], b[pairs]], -1)
            d_left, values, cs = _less_mean(d_o[pairs], o[pairs]), _right(v[pairs]), _right(c[pairs])
            for block, (weights, e, x, r) in blocks:
                here = block.columns
                d_rows, aq_rows, v_here, c_here = block.of(d_left), block.of(aq), values[:, here], cs[:, here]
                _weights(block, block.of(left), right[:, here], out=weights)
                torch.bmm(d_rows, v_here.mT, out=x)
                torch.bmm(aq_rows, kb[:, here].mT, out=e).mul_(weights)
                e.addcmul_(weights, e.sum(-1, keepdim=True), value=-1)
                d_rows = d_rows[..., :-1]
                g_rows = _product(weights, c_here[..., :-1]).baddbmm_(e, v_here[..., :-1])
                torch.bmm(_less_mean(d_rows, g_rows), c_here.mT, out=r).mul_(weights).addcmul_(e, x)
                x.mul_(weights)
                block.put(g_rows, into=g_d_o[pairs])
                block.put(_product(x, kb[:, here, width:]).baddbmm_(r, kb[:, here, :width]), into=g_q[pairs])
                g_v[pairs, here].baddbmm_(e.mT, d_rows)
                g_k[pairs, here].baddbmm_(x.mT, aq_rows[..., :width]).baddbmm_(r.mT, aq_rows[..., width:])
        return g_d_o, g_q.mul_(setting.scale), g_k, g_v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        raise OrderError("`attention` has a first and a second derivative, and a third was asked for; use `plain_attention` for it.")


# A column more in both factors of a product subtracts a number from every row of it, without a pass over a T x S matrix.


def _right(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0)


def _left(x: Tensor, minus: Tensor) -> Tensor:
    return torch.cat([x, -minus], -1)


def _less_mean(d_o: Tensor, o: Tensor) -> Tensor:
    return _left(d_o, (d_o * o).sum(-1, keepdim=True))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A product that autocast leaves alone, as it does every operation that is told where to put its result."""
    return torch.bmm(left, right, out=left.new_empty(len(left), left.shape[1], right.shape[2]))


def _weights(block: Block, rows: Tensor, keys: Tensor, *, out: Tensor) -> None:
    """P. Huge logits round otherwise here than where their normaliser came from: the clamp keeps P finite."""
    block.logits(rows, keys, out=out).clamp_(max=0.0).exp2_()


Slab = tuple[slice, Iterator[tuple[Block, list[Tensor]]]]


def _slabs(q: Tensor, k: Tensor, mask: Tensor | None, setting: Setting, *, buffers: int) -> Iterator[Slab]:
    """Pairs that are computed together, their blocks, and memory for so many matrices of each block.

    The memory is the same for all blocks: to allocate it anew for each would cost as much as a product.
    """
    pairs, heads, length, _ = q.shape
    height = max(1, min(length, ROWS // heads))
    size = heads * height * k.shape[1]
    together = max(1, min(pairs, BLOCK // max(1, size)))
    memory = q.new_empty(buffers, together * size)
    whole = [_whole_block(slice(row, min(row + height, length)), q, k, setting) for row in range(0, length, height)]
    for start in range(0, pairs, together):
        slab = slice(start, min(start + together, pairs))
        blocks = whole if mask is None else (_masked_block(block, mask, slab, q.dtype, setting) for block in whole)
        shapes = ((block, (slab.stop - start, heads * block.height, block.width)) for block in blocks if block.width)
        yield slab, ((block, [part[: math.prod(shape)].view(shape) for part in memory]) for block, shape in shapes)


def _whole_block(rows: slice, q: Tensor, k: Tensor, setting: Setting) -> Block:
    """Columns that rows see where there is no mask."""
    keys, later = k.shape[1], k.shape[1] - q.shape[2]
    if not setting.causal:
        return Block(rows, slice(0, keys))
    first, end = (min(keys, max(0, row + later)) for row in (rows.start + 1, rows.stop))
    seen = torch.arange(first, end, device=q.device) <= torch.arange(rows.start, rows.stop, device=q.device)[:, None] + later
    return Block(rows, slice(0, end), (_bias(seen, q.dtype),) if first < end else ())


def _masked_block(block: Block, mask: Tensor, pairs: slice, dtype: torch.dtype, setting: Setting) -> Block:
    """What remains of a block under a mask, without the columns at either end that no row sees."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    groups = min(setting.groups, mask.shape[1])
    mask = mask.reshape(len(mask), groups, mask.shape[1] // groups, *mask.shape[2:])
    mask = mask[..., block.rows if mask.shape[3] > 1 else slice(None), block.columns if mask.shape[4] > 1 else slice(None)]
    pair = torch.arange(pairs.start, pairs.stop, device=mask.device)
    seen = mask[pair // setting.groups % len(mask), pair % groups].expand(-1, -1, -1, block.width)
    found = seen.flatten(0, 2).any(0).nonzero()
    first, end = (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)
    start = block.columns.start
    causal = tuple(bias[..., : max(0, bias.shape[-1] - (block.width - end))] for bias in block.biases)
    causal = tuple(bias[..., -min(bias.shape[-1], end - first) :] for bias in causal if bias.shape[-1])
    return Block(block.rows, slice(start + first, start + end), (*causal, _bias(seen[..., first:end], dtype)))


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 and -inf, several times faster by way of a logarithm than by filling."""
    return seen.to(dtype).log_()
