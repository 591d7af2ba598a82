"""What is not planned. Imports no torch: it is told before anything is loaded."""

from app.config.schema import ParallelConfig
from app.errors import ConfigError


def not_planned(parallel: ParallelConfig, processes: int) -> list[str]:
    """Why there is no plan of a run in so many processes; nothing where there is one."""
    if processes == 1 or not parallel.divides:
        return []
    return [
        f"parallel={parallel.kind}: the memory of a run that divides its model among {processes} processes is not "
        "planned. Plan it undivided with parallel=auto, which needs more, or start the run with training.max_steps=2 "
        "and read what it measured."
    ]


def require_planned(parallel: ParallelConfig, processes: int) -> None:
    """Raise the same."""
    problems = not_planned(parallel, processes)
    if problems:
        raise ConfigError(problems)
