"""Optimizer for bfloat16 weights: steps one parameter at a time in float32 and rounds it stochastically.

The optimizer inside is built for float32 stand-ins, which have a shape and no memory between steps. So its states are
in float32, and are saved and loaded as ever.

bfloat16 is the upper half of a float32. Random bits are added to the lower half before it is cut off: the nearer a
number is to the one above, the more often the sum carries over, so small updates are not lost on average. The bits
belong to places in the whole tensor: a shard is rounded as in the whole.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.optim.gradient_scaling import skips_on_device, step_unless
from app.optim.parameter_groups import Trained

_HALF_BITS = 16
PIECE_NUMBERS = 1 << 24  # rounded at once, with a generator of their own: random bits need memory
_NAN_BITS = 0x7FC00000  # set for every NaN: a sum, or the loss of the lower half, would make a number of some
STEPS_ROUNDED = "steps_rounded"  # key in the first group, so that a state_dict has it


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a parameter in the optimizer inside."""

    exact: nn.Parameter  # the stand-in, or the parameter itself where it is float32 already
    part: Optimizer
    group: int
    name: str


class OneByOne(Optimizer):
    """Optimizer that steps one parameter at a time, with the groups and states of the optimizer inside."""

    def __init__(
        self,
        build: Callable[[Sequence[Trained]], Optimizer],
        trained: Sequence[Trained],
        seed: int,
        *,
        in_backward: bool,
    ) -> None:
        number = torch.zeros((), device=trained[0].parameter.device)
        exact = [
            replace(each, parameter=nn.Parameter(number.expand(each.parameter.shape)))
            if each.parameter.dtype == torch.bfloat16
            else each
            for each in trained
        ]
        self.inner = build(exact)
        self.in_backward = in_backward  # whether `step_one` is called during the backward pass
        self._seed = seed
        super().__init__(self.inner.param_groups, {})
        self._rounds = any(each.parameter.dtype == torch.bfloat16 for each in trained)
        if self._rounds:
            self.inner.param_groups[0][STEPS_ROUNDED] = 0
        self._share()
        real = {each.name: each.parameter for each in trained}
        self._places = {real[place.name]: place for place in _places(self.inner)}
        self._trained = {each.parameter: each for each in trained}

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters of the model, for which the optimizer inside has stand-ins."""
        return list(self._places)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step can be skipped on the device: `gradient_scaling.skips_on_device` asks."""
        return skips_on_device(self.inner)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that still has a gradient, and count the step."""
        assert closure is None
        found_inf = getattr(self, "found_inf", None)
        for parameter in self._places:
            if parameter.grad is not None:
                self.step_one(parameter, found_inf)
        if self._rounds:
            self.param_groups[0][STEPS_ROUNDED] += 1
        return None

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter, found_inf: Tensor | None = None) -> None:
        """Step one parameter, or none if `found_inf` is 1, which needs an optimizer that skips on the device."""
        place = self._places[parameter]
        if place.exact is parameter:
            self._step_at(place, found_inf)
            return
        assert parameter.grad is not None
        nothing = place.exact.data
        try:
            place.exact.data = parameter.detach().float()
            place.exact.grad = parameter.grad.float()
            if self.in_backward:
                parameter.grad = None  # not read any more
            self._step_at(place, found_inf)
            place.exact.grad = None
            step, trained = self.param_groups[0][STEPS_ROUNDED], self._trained[parameter]
            round_into(parameter, place.exact, f"{self._seed}/{step}/{trained.place}", trained.first)
        finally:
            place.exact.grad, place.exact.data = None, nothing

    def _step_at(self, place: _Place, found_inf: Tensor | None) -> None:
        """Step with groups of this parameter only: the optimizer inside would visit all parameters every time."""
        part, group = place.part, self.param_groups[place.group]
        groups = part.param_groups
        part.param_groups = [{**group, "params": [place.exact], "param_names": [place.name]}]
        try:
            if found_inf is None:
                part.step()
            else:
                step_unless(part, found_inf)
        finally:
            part.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for parameter in self._places:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], **how: Any) -> None:
        self.inner.load_state_dict(state_dict, **how)
        self._share()

    def _share(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


def ordinary(optimizer: Optimizer) -> Optimizer:
    """Optimizer of torch or bitsandbytes: the one inside, or the given one."""
    return optimizer.inner if isinstance(optimizer, OneByOne) else optimizer


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of the model that an optimizer steps."""
    if isinstance(optimizer, OneByOne):
        return optimizer.stepped
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps_in_backward(optimizer: Optimizer) -> TypeGuard[OneByOne]:
    """Whether weights are stepped during the backward pass."""
    return isinstance(optimizer, OneByOne) and optimizer.in_backward


def _places(optimizer: Optimizer) -> list[_Place]:
    parts: Sequence[Optimizer] = getattr(optimizer, "parts", (optimizer,))
    owners = {id(group): part for part in parts for group in part.param_groups}
    return [
        _Place(exact, owners[id(group)], at, name)
        for at, group in enumerate(optimizer.param_groups)
        for exact, name in zip(group["params"], group["param_names"], strict=True)
    ]


@torch.no_grad()
def round_into(weight: Tensor, exact: Tensor, key: str, first: int = 0) -> None:
    """Round `exact`, in float32, up or down into `weight`, in bfloat16, so that the mean is `exact`.

    `key` decides the random bits; `first` is the place of the first number in the whole tensor. Numbers of bfloat16,
    infinities and NaN stay as they are. Works on bits, so that subnormal numbers are not flushed to zero.
    """
    assert weight.dtype == torch.bfloat16
    assert exact.dtype == torch.float32
    given = exact.reshape(-1).view(torch.int32)
    target = weight if weight.is_contiguous() else weight.contiguous()
    upper = target.view(-1).view(torch.int16)
    end = first + given.numel()
    for piece in range(first - first % PIECE_NUMBERS, end, PIECE_NUMBERS):
        low, high = max(piece, first), min(piece + PIECE_NUMBERS, end)
        bits = given[low - first : high - first]
        chance = _random_bits(f"{key}/{piece}", high - piece, exact.device)[low - piece :]
        chance.add_(bits).masked_fill_(bits.view(torch.float32).isnan(), _NAN_BITS)
        upper[low - first : high - first].copy_(chance.bitwise_right_shift_(_HALF_BITS))
    if target is not weight:
        weight.copy_(target)


def _random_bits(key: str, count: int, device: torch.device) -> Tensor:
    """First `count` numbers of a piece."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    # on a GPU the first numbers depend on how many are drawn
    drawn = PIECE_NUMBERS if device.type == "cuda" else count
    numbers = torch.empty(drawn, dtype=torch.int32, device=device)
    return numbers.random_(0, 1 << _HALF_BITS, generator=generator)[:count]
