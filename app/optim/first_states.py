"""The states of an optimizer before its first step: made to see that they fit, and without a trace in the numbers.

What an optimizer keeps is made by its first step. Here it is made ahead: bitsandbytes has a method for it; all others
make a step that moves nothing. Afterwards all of it is dropped, and the real first step makes it anew.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from app.optim.one_by_one import ordinary
from app.optim.skip import skips_on_device, step_unless


def make_states(optimizer: Optimizer) -> int:
    """Changes no parameter; returns how many have states. All that are to get some have a gradient, which is zero."""
    groups = [dict(group) for group in optimizer.param_groups]
    _make(optimizer)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)  # no step was made, and none is counted
    return len(optimizer.state)


def _make(optimizer: Optimizer) -> None:
    """One parameter at a time, if that is how it is stepped: its copies are part of what must fit."""
    inner: Any = ordinary(optimizer)
    if callable(getattr(inner, "init_state", None)) and (inner is optimizer or inner.is_paged):
        _initialise(inner)
    elif skips_on_device(optimizer):
        device = optimizer.param_groups[0]["params"][0].device
        step_unless(optimizer, torch.ones((), device=device))
    else:
        _step_on_the_spot(optimizer)


def drop_states(optimizer: Optimizer) -> None:
    """As before `make_states`. Paged memory cannot be given back: it stays, as bitsandbytes has initialised it."""
    for parameter in list(optimizer.state):
        if not any(getattr(value, "is_paged", False) for value in optimizer.state[parameter].values()):
            del optimizer.state[parameter]


@torch.no_grad()
def _initialise(optimizer: Any) -> None:
    for at, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not optimizer.state[parameter]:
                optimizer.init_state(group, parameter, at, place)


def _step_on_the_spot(optimizer: Optimizer) -> None:
    """At a rate of zero nothing decays or is added; with gradients of zero not even a zero changes its sign."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
