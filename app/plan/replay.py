"""What is alive at the worst instant of each stage of a step, read from the order in which storages came and went."""

from collections.abc import Sequence
from itertools import pairwise

from app.engine.counting import Event
from app.plan.stages import FORWARD, HEAD, HEAD_BACKWARD

_LOSS_HEAD = (HEAD, HEAD_BACKWARD)


class Replay:
    """`kinds` of the storages that are kept, by their serial; `stages` by the event that each begins with."""

    def __init__(
        self, events: Sequence[Event], stages: Sequence[tuple[int, str]], kinds: dict[int, str]
    ) -> None:
        self._events = events
        self._bounds = [(0, ""), *stages, (len(events), "")]
        self._kinds = dict(kinds)
        self._name_the_others()

    def phases(self) -> dict[str, dict[str, int]]:
        """Bytes by kind at the worst instant of each stage; one that is reached more than once is one."""
        alive: dict[str, int] = {}
        worst: dict[str, dict[str, int]] = {}
        for (start, stage), (end, _) in pairwise(self._bounds):
            total = sum(alive.values())
            most = sum(worst[stage].values()) if stage in worst else -1
            if total > most:
                most, worst[stage] = total, dict(alive)
            for serial, size in self._events[start:end]:
                kind = self._kinds[serial]
                alive[kind] = alive.get(kind, 0) + size
                total += size
                if total > most:
                    most, worst[stage] = total, dict(alive)
        worst.pop("")  # what was there before
        return worst

    def _name_the_others(self) -> None:
        """What is let go before the stage ends in which it was made is temporary, in any of them."""
        gone = {serial: at for at, (serial, size) in enumerate(self._events) if size < 0}
        for (start, stage), (end, _) in pairwise(self._bounds):
            for serial, size in self._events[start:end]:
                if size > 0 and serial not in self._kinds:
                    self._kinds[serial] = _kind(stage, survives=gone.get(serial, end) >= end)


def _kind(stage: str, *, survives: bool) -> str:
    if stage in _LOSS_HEAD:
        return "loss_head"
    return "saved_activations" if stage == FORWARD and survives else "temporary"
