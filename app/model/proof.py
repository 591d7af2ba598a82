"""What a check before the first step found, kept with the run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    """`difference` is relative; the run is refused where it is more than `allowed`."""

    what: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """False for what is not a number."""
        return self.difference <= self.allowed
