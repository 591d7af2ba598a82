"""bfloat16 weights that learn: stochastic rounding, so that small updates are not lost on average.

bfloat16 is the upper half of a float32. Random bits are added to the lower half before it is cut off: the nearer a
number is to the one above, the more often the sum carries over, exactly in proportion. The bits belong to places in
the whole tensor, so a process that keeps some rows of it rounds them as one that keeps all.
"""

import hashlib

import torch
from torch import Tensor

_HALF_BITS = 16
_PIECE_NUMBERS = 1 << 24  # rounded at once, with a generator of their own: random bits need memory
_NAN_BITS = 0x7FC00000  # set for every NaN: a sum, or the loss of the lower half, would make a number of some


@torch.no_grad()
def round_into(weight: Tensor, exact: Tensor, key: str, first: int = 0) -> None:
    """`weight`, in bfloat16, becomes `exact`, in float32, rounded up or down so that the mean is `exact`.

    `key` decides the random bits; `first` is the place of the first number in the whole tensor. What bfloat16 can
    tell stays as it is, infinities and NaN too. All of it is done on bits, so numbers too small for floating point at
    full precision are not flushed to zero.
    """
    assert weight.dtype == torch.bfloat16
    assert exact.dtype == torch.float32
    given = exact.reshape(-1).view(torch.int32)
    target = weight if weight.is_contiguous() else weight.contiguous()
    upper = target.view(-1).view(torch.int16)
    end = first + given.numel()
    for piece in range(first - first % _PIECE_NUMBERS, end, _PIECE_NUMBERS):
        low, high = max(piece, first), min(piece + _PIECE_NUMBERS, end)
        bits = given[low - first : high - first]
        chance = _random_bits(f"{key}/{piece}", high - piece, exact.device)[low - piece :]
        chance.add_(bits).masked_fill_(bits.view(torch.float32).isnan(), _NAN_BITS)
        upper[low - first : high - first].copy_(chance.bitwise_right_shift_(_HALF_BITS))
    if target is not weight:
        weight.copy_(target)


def _random_bits(key: str, count: int, device: torch.device) -> Tensor:
    """The first `count` numbers of a piece."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    # on a GPU the first numbers depend on how many are drawn
    drawn = _PIECE_NUMBERS if device.type == "cuda" else count
    numbers = torch.empty(drawn, dtype=torch.int32, device=device)
    return numbers.random_(0, 1 << _HALF_BITS, generator=generator)[:count]
