"""The machine of a run: processes, device, precision and attention backend."""

from collections.abc import Callable
from dataclasses import dataclass

from app.distributed.environment import world
from app.distributed.process_group import Runtime
from app.distributed.process_group import start as start_processes
from app.layers import quantization
from app.training import memory_in_use
from app.training.choices import Choices, choose
from app.training.optimizer_in_backward import require_gradients_one_by_one
from app.training.rows import Rows
from app.training.start import Start


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes, device, precision and attention of a run; compilation is decided by the plan."""

    runtime: Runtime
    choices: Choices
    used_bytes: int | None  # GPU memory in use before this process allocated any


def join(rows: Rows, start: Start, say: Callable[[str], None]) -> Machine:
    """Choose precision and attention for this machine, and connect all processes."""
    run = rows.run
    rows.base.on_meta()  # refuse a model that cannot be trained before examining the machine
    # memory of the GPU is read before this process allocates anything on it
    for remark in (*(f"memory  {note}" for note in memory_in_use.notes()), *start.remarks):
        say(remark)
    used_bytes = memory_in_use.device_used_bytes()
    choices = choose(run, rows.base, start.choices)
    require_gradients_one_by_one(run.optimizer, world().size, choices.precision)
    runtime = start_processes(run.launch, choices.precision, run.seed)
    quantization.require_hardware(run.quantization, runtime.device)
    return Machine(runtime, choices, used_bytes)
