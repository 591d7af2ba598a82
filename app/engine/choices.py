"""What is chosen for the machine at the start of a run, stored with it, and kept when it is continued."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.config.schema import AttentionConfig, PrecisionConfig
from app.engine.precision import check_precision, choose_precision
from app.engine.runtime import default_device
from app.errors import ConfigError
from app.model.attention import select


@dataclass(frozen=True, slots=True)
class Choices:
    """Names, as in the groups of the same name; never `auto`."""

    precision: str
    attention: str


def choose(precision: PrecisionConfig, attention: AttentionConfig, kept: Mapping[str, str]) -> Choices:
    """`auto` means what it meant when the run began, else what suits this machine."""
    problems = check_precision(precision)
    if problems:
        raise ConfigError(problems)
    continued = bool(kept)
    return Choices(
        precision=kept["precision"]
        if continued and precision.kind == "auto"
        else choose_precision(precision),
        attention=kept["attention"]
        if continued and attention.kind == "auto"
        else select(attention, default_device()),
    )
