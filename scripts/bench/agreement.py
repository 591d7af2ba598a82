"""Whether contenders did the same work: the losses of their first steps must agree."""

from collections.abc import Mapping, Sequence

_STEPS = 10
_ALLOWED = {"fp32": 1e-3}  # relative
_ALLOWED_ELSE = 1e-2  # bf16

Losses = Sequence[float | None]


def allowed_at(precision: str) -> float:
    """The largest relative difference."""
    return _ALLOWED.get(precision, _ALLOWED_ELSE)


def furthest(losses: Mapping[str, Losses]) -> dict[str, float]:
    """How far the first losses of each contender are from those of the first one; infinitely if one is not a number."""
    reference, *others = losses
    return {name: max(_differences(losses[reference], losses[name])) for name in others}


def _differences(ours: Losses, theirs: Losses) -> list[float]:
    pairs = list(zip(ours[:_STEPS], theirs[:_STEPS], strict=True))
    return [float("inf") if a is None or b is None else abs(a - b) / abs(a) for a, b in pairs]
