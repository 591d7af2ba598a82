"""The peak of memory, predicted before the weights are loaded and measured in the steps: both are told."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.batch import Batch
from app.config.schema import RunConfig
from app.distributed.process_group import Runtime
from app.errors import ConfigError
from app.tracking.formatting import format_bytes
from app.training.choices import Choices
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper, StepResult

_COUNTED = 2  # of this start: the first step makes the optimizer's states


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of one process. On a CPU it is the peak of a step, else that of the run."""

    bytes: int
    where: str
    anatomy: dict[str, int]

    def words(self) -> str:
        """For the table that a run starts with."""
        return f"{format_bytes(self.bytes)} predicted at its peak ({self.where})"


# The micro-batch that needs most, how many of them a step has, and `cpu` or `cuda`. It may raise whatever it likes.
Predict = Callable[[RunConfig, Choices, Batch, int, str], Predicted]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What came of predicting: a figure, or why there is none."""

    predicted: Predicted | None
    words: str

    @classmethod
    def made(cls, predict: Predict | None, *given: Any) -> "Forecast":
        """A kind of model that cannot be planned can be trained all the same."""
        if predict is None:
            return cls(None, "")
        try:
            predicted = predict(*given)
        except ConfigError as reason:
            return cls(None, str(reason))
        except Exception as fault:  # noqa: BLE001  whatever a kind does in a trace, the run does not depend on it
            first = str(fault).strip().partition("\n")[0][:200]
            return cls(None, f"no prediction for this model ({type(fault).__name__}: {first})")
        return cls(predicted, predicted.words())

    def rows(self) -> list[tuple[str, str]]:
        """Of the table that a run starts with."""
        return [("memory", self.words)] if self.words else []

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {} if self.predicted is None else asdict(self.predicted)


class Measured:
    """Measures the steps of a start. Without a GPU one of them is run counted, which changes none of its numbers."""

    def __init__(self, runtime: Runtime, steps: int) -> None:
        self._runtime = runtime
        self._counted_at = min(_COUNTED, steps)
        self._steps = 0
        self._peak: int | None = None

    def run(self, stepper: Stepper, batches: Sequence[Batch], lr: float) -> StepResult:
        """A step."""
        self._steps += 1
        # compiled layers make storages without an operation that could be seen
        is_compiled = stepper.trainee.compiled_layers is not None
        if self._steps != self._counted_at or self._runtime.device.type != "cpu" or is_compiled:
            return stepper.run(batches, lr)
        counter = StorageCounter("cpu")
        for kind, tensors in kept_tensors(stepper.trainee, stepper.optimizer).items():
            counter.hold(kind, tensors)
        if self._runtime.processes > 1:  # with DDP these stay: gradients are views of what is sent
            counter.hold("gradients", (p.grad for p in stepper.trainee.parameters() if p.grad is not None))
        for batch in batches:
            counter.ignore(batch.tensors)
        with counter:
            result = stepper.run(batches, lr)
        self._peak = counter.peak
        return result

    @property
    def bytes(self) -> int | None:
        """The most that was allocated so far; None before it is known."""
        return self._peak if self._runtime.device.type == "cpu" else self._runtime.peak_memory_bytes()
