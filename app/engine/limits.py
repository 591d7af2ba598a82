"""What a model's own config.json limits of a run, before its data is read."""

from collections.abc import Callable
from dataclasses import replace

from app.config.schema import RunConfig
from app.model.positions import first_position
from app.model.source import positions_of
from app.model.tasks import TASKS
from app.model.weights import build_on_meta


def within_positions(run: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """The run with rows no longer than the model has positions for; what is longer is over-long as any other row."""
    positions = positions_of(run.model)
    if positions is not None:
        positions -= first_position(build_on_meta(run.model, TASKS[run.task.kind], "eager"))
    if positions is None or run.dataset.max_length <= positions:
        return run
    say(
        f"note    dataset.max_length={run.dataset.max_length} -> {positions}: the model has no more positions"
    )
    return replace(run, dataset=replace(run.dataset, max_length=positions))
