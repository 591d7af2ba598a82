"""How far a run is: what a checkpoint must know besides tensors."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Progress:
    """Counts since the first step of the run, whatever was resumed in between."""

    step: int = 0  # optimizer steps done; also the cursor of the loader
    tokens: int = 0
    trained_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_loss: float | None = None
    best_step: int = 0
    evals_without_gain: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    last_eval_loss: float | None = None
    depth: int = 0  # how often micro-batches are halved since they did not fit into memory

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for json."""
        return asdict(self)

    def remarks(self) -> list[str]:
        """What a start is told of those before it."""
        if not self.depth:
            return []
        parts = (
            f"micro-batches are split by documents from the first step on, into up to {2**self.depth} parts"
        )
        return [f"{parts}: whole they did not fit in a start before"]

    def note_eval(self, loss: float, min_delta: float) -> bool:
        """Take in an evaluation; true when it is the best so far."""
        self.last_eval_loss = loss
        improved = self.best_loss is None or loss < self.best_loss - min_delta
        if improved:
            self.best_loss, self.best_step, self.evals_without_gain = loss, self.step, 0
        else:
            self.evals_without_gain += 1
        return improved
