"""What a model's own config.json limits of a run, before its data is read."""

from collections.abc import Callable
from dataclasses import replace

from app.config.schema import RunConfig
from app.model.positions import first_position
from app.model.source import positions_of
from app.model.tasks import task_of
from app.model.weights import build_on_meta, numbers_at_hand


def within_positions(run: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """The run with rows no longer than the model has positions for; what is longer is over-long as any other row."""
    positions = positions_of(run.model)
    if positions is None or run.dataset.max_length <= positions - _most_unused(run):
        return run
    positions -= first_position(build_on_meta(run.model, task_of(run.task), "eager"))
    if run.dataset.max_length <= positions:
        return run
    say(
        f"note    dataset.max_length={run.dataset.max_length} -> {positions}: the model has no more positions"
    )
    return replace(run, dataset=replace(run.dataset, max_length=positions))


def _most_unused(run: RunConfig) -> int:
    """Where counting begins is never beyond this: a model need not be built to know that rows fit."""
    padding = getattr(numbers_at_hand(run.model, task_of(run.task)), "pad_token_id", None)
    return 0 if padding is None else int(padding) + 1
