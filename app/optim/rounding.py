"""bfloat16 weights that learn: what is lost in rounding is made up for by chance, and so not lost on average.

bfloat16 is the upper half of a float32. Random bits are added to the lower half before it is cut off: the nearer a
number is to the one above, the more often the sum carries over, exactly in proportion.
"""

import hashlib

import torch
from torch import Tensor

_HALF = 16  # bits
_PIECE = 1 << 24  # numbers that are rounded at once: the random ones need memory of their own
_NONE = 0x7FC00000  # of all that is not a number: to others a sum, or the loss of the lower half, would give a value


@torch.no_grad()
def round_into(weight: Tensor, exact: Tensor, random: torch.Generator) -> None:
    """`weight`, in bfloat16, becomes `exact`, in float32, rounded up or down so that the mean is `exact`.

    What bfloat16 can tell stays as it is, infinities and what is not a number too. All of it is done on bits, so
    numbers too small for floating point at full precision are not flushed to zero.
    """
    assert weight.dtype == torch.bfloat16
    assert exact.dtype == torch.float32
    given = exact.reshape(-1).view(torch.int32)
    target = weight if weight.is_contiguous() else weight.contiguous()
    upper = target.view(-1).view(torch.int16)
    for start in range(0, given.numel(), _PIECE):
        bits, half = given[start : start + _PIECE], upper[start : start + _PIECE]
        chance = torch.empty_like(bits).random_(0, 1 << _HALF, generator=random)
        chance.add_(bits).masked_fill_(bits.view(torch.float32).isnan(), _NONE)
        half.copy_(chance.bitwise_right_shift_(_HALF))
    if target is not weight:
        weight.copy_(target)


def chance_of(device: torch.device, seed: int, step: int, index: int) -> torch.Generator:
    """Random numbers of one weight in one step: of no other, and the same when the step is made again."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
