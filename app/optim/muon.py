"""Muon for the matrices and AdamW for the rest, behind one optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Steps both; to the outside their groups and their states are those of one optimizer.

    It cannot skip a step on the device: torch's Muon has no such switch.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.parts: tuple[Optimizer, Optimizer] = (muon, adamw)
        self._num_matrix_groups = len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both parts; a closure makes no sense for two."""
        assert closure is None
        for part in self.parts:
            part.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; afterwards the parts work on what was loaded."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        # Each part touches the state of its own parameters only, so one dictionary serves both.
        muon, adamw = self.parts
        muon.state = adamw.state = self.state
        muon.param_groups = self.param_groups[: self._num_matrix_groups]
        adamw.param_groups = self.param_groups[self._num_matrix_groups :]
