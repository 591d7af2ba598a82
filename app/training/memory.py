"""Peak memory of a run: predicted before weights are loaded, and measured in its steps."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.batch import Batch
from app.distributed.process_group import Runtime
from app.errors import ConfigError, first_line
from app.tracking.formatting import format_bytes
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper, StepResult

COUNTED_STEP = 2  # of this start: the first step allocates the optimizer states


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted peak of one process: on a CPU of a step, on a GPU of the run."""

    bytes: int
    where: str
    anatomy: dict[str, int]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction, or the reason why there is none."""

    predicted: Predicted | None
    text: str

    @classmethod
    def made(cls, predict: Callable[..., Predicted], *arguments: Any) -> "Forecast":
        """Predict; a model that cannot be planned can still be trained."""
        try:
            predicted = predict(*arguments)
        except ConfigError as reason:
            return cls(None, str(reason))
        except Exception as fault:  # noqa: BLE001  whatever a kind does in a trace, the run does not depend on it
            return cls(None, f"no plan for this model ({type(fault).__name__}: {first_line(fault)[:200]})")
        return cls(predicted, f"{format_bytes(predicted.bytes)} planned for tensors, the most in: {predicted.where}")

    def rows(self) -> list[tuple[str, str]]:
        """Rows for the first table of a run."""
        return [("memory", self.text)] if self.text else []

    def facts(self) -> dict[str, Any]:
        return {} if self.predicted is None else asdict(self.predicted)


class Measured:
    """Measures the steps of a start. Without a GPU one step runs under a storage counter, which changes no number."""

    def __init__(self, runtime: Runtime, steps: int) -> None:
        self._runtime = runtime
        self._counted_at = min(COUNTED_STEP, steps)
        self._steps = 0
        self._peak: int | None = None

    def run(self, stepper: Stepper, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run a step, counted where it is the one to count."""
        self._steps += 1
        # compiled layers allocate storages without operations that the counter sees
        is_compiled = stepper.model.compiled_layers is not None
        if self._steps != self._counted_at or self._runtime.device.type != "cpu" or is_compiled:
            return stepper.run(batches, lr)
        counter = StorageCounter()
        for kind, tensors in kept_tensors(stepper.model, stepper.optimizer).items():
            counter.hold(kind, tensors)
        if self._runtime.processes > 1:  # with DDP these persist: gradients are views of the buckets
            counter.hold("gradients", (p.grad for p in stepper.model.parameters() if p.grad is not None))
        for batch in batches:
            counter.ignore(batch.tensors)
        with counter:
            result = stepper.run(batches, lr)
        self._peak = counter.peak
        return result

    @property
    def bytes(self) -> int | None:
        """The peak so far; None before it is known."""
        return self._peak if self._runtime.device.type == "cpu" else self._runtime.peak_memory_bytes()
