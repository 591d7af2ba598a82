"""What is chosen for the machine at the start of a run, stored with it, and kept when it is continued."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.config.schema import AttentionConfig, PrecisionConfig
from app.distributed.process_group import default_device
from app.errors import ConfigError
from app.model.attention import Needs, select
from app.training.precision import check_precision, choose_precision


@dataclass(frozen=True, slots=True)
class Choices:
    """Names, as in the groups of the same name; never `auto`."""

    precision: str
    attention: str


def choose(
    precision: PrecisionConfig,
    attention: AttentionConfig,
    needs: Callable[[str], Needs],
    kept: Mapping[str, str],
) -> Choices:
    """`auto` means what it meant when the run began, else what suits this machine. `needs` are those at a precision."""
    problems = check_precision(precision)
    if problems:
        raise ConfigError(problems)
    if kept and precision.kind == "auto":
        precision = PrecisionConfig(kind=kept["precision"])
    if kept and attention.kind == "auto":
        attention = AttentionConfig(kind=kept["attention"])
    name = choose_precision(precision)
    return Choices(precision=name, attention=select(attention, default_device(), lambda: needs(name)))
