"""Vectors in 8 or 4 bits: whole numbers, and one scale for each group of neighbours in a vector.

    x ~ scale * code,    scale = max |x| / (2^(bits - 1) - 1) over the group,    |code| <= 2^(bits - 1) - 1

A scale is rounded to bfloat16 first and the codes are chosen for what came out. So scale * code is exact in float32, the largest number of a group
always has the largest code, and what was quantized once gives the same codes and scales again. Two codes of 4 bits share a byte, the first one low.

Source: ours; rounding to the nearest with a scale for each group is standard. Tests: tests/test_quantize.py.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from graven.errors import SpecError

GROUP = 32  # numbers to a scale: 16 more bits for each 32 of 8 or of 4
TINY = torch.finfo(torch.float32).tiny
DTYPES = {8: torch.int8, 4: torch.uint8}


def quantize(state: Float[Tensor, "*B D"], *, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Codes [*B, D] int8, or [*B, D / 2] uint8 for 4 bits, and scales [*B, ceil(D / group)] bfloat16.

    Raises:
        SpecError: `bits` is neither 8 nor 4, `group` is below 1, or 4 bits are asked for and the width is odd.
    """
    check_bits(bits=bits, group=group, width=state.shape[-1])
    most = largest_code(bits)
    x = _grouped(state.float(), group)
    scales = (x.abs().amax(-1) / most).to(torch.bfloat16)
    scales = scales.where(scales.float() >= TINY, 0.0)  # of zeros, and of numbers too small for a scale
    steps = scales.float()[..., None]
    codes = torch.where(steps > 0, x / steps.clamp(min=TINY), torch.zeros(())).round().clamp(-most, most)
    whole = codes.flatten(-2)[..., : state.shape[-1]]
    if bits == 8:
        return whole.to(torch.int8).contiguous(), scales.contiguous()
    low, high = ((whole[..., first::2] + 8).to(torch.uint8) for first in (0, 1))
    return (low | high << 4).contiguous(), scales.contiguous()


def dequantize(codes: Tensor, scales: Float[Tensor, "*B G"], *, bits: int, group: int) -> Float[Tensor, "*B D"]:
    """The numbers that codes and scales stand for, in float32.

    Raises:
        SpecError: Codes and scales do not fit each other.
    """
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
    width = codes.shape[-1]
    check_bits(bits=bits, group=group, width=width)
    if list(scales.shape) != [*codes.shape[:-1], -(-width // group)]:
        raise SpecError(f"there are scales of shape {list(scales.shape)} for codes of shape {list(codes.shape)} in groups of {group}.")
    return (_grouped(codes.float(), group) * scales.float()[..., None]).flatten(-2)[..., :width].contiguous()


def check_bits(*, bits: int, group: int, width: int) -> None:
    """Pass where vectors of this width can be quantized so.

    Raises:
        SpecError: They cannot; the sentence says why.
    """
    if bits not in DTYPES:
        raise SpecError(f"`bits` is {bits}; it must be 8 or 4.")
    if group < 1:
        raise SpecError(f"`group` is {group}; it must be at least 1.")
    if bits == 4 and width % 2:
        raise SpecError(f"the vectors have the odd width {width} and two numbers of 4 bits share a byte; use 8 bits.")


def largest_code(bits: int) -> int:
    """127 or 7."""
    return (1 << bits - 1) - 1


def stored_bytes(numbers: int, vectors: int, *, bits: int, group: int) -> int:
    """Bytes of so many numbers in so many vectors, scales included."""
    return numbers * bits // 8 + 2 * vectors * -(-numbers // vectors // group)


def _grouped(x: Float[Tensor, "*B D"], group: int) -> Float[Tensor, "*B G K"]:
    padded = F.pad(x, (0, -x.shape[-1] % group))
    return padded.reshape(*padded.shape[:-1], -1, group)
