"""How many layers are computed again in the backward pass: told, or as few as the memory of the machine asks for."""

from collections.abc import Callable, Mapping

from app.batch import Batch
from app.config.schema import RunConfig, TrainingConfig
from app.config.validate import converted
from app.distributed.host_group import Peers
from app.errors import ConfigError
from app.training.choices import Choices

AUTO = "auto"
KEPT = "recompute"  # among the choices of a checkpoint

# The micro-batch that needs most, how many of them a step has, layers: how many of them, and a remark
Fewest = Callable[[RunConfig, Choices, Batch, int, int], tuple[int, str]]


def layers_of(training: TrainingConfig) -> bool | int:
    """All of them, as long as nobody has found out how many are needed."""
    return True if isinstance(training.recompute, str) else training.recompute


def kept_layers(choices: Mapping[str, str]) -> bool | int | None:
    """What a continued run began with; None where there is nothing to continue."""
    return converted(choices[KEPT], bool | int) if KEPT in choices else None


def found_layers(find: Callable[[], tuple[int, str]], peers: Peers, layers: int) -> tuple[int, str]:
    """The first process speaks for all. A kind that cannot be planned gets what needs least memory."""
    count, remark = layers, ""
    if peers.rank == 0:
        try:
            count, remark = find()
        except ConfigError as reason:
            remark = f"{reason} So all {layers} layers are recomputed"
        except Exception as fault:  # noqa: BLE001  whatever a kind does in a trace, the run does not depend on it
            remark = f"no plan for this model ({type(fault).__name__}), so all {layers} layers are recomputed"
    return int(peers.highest(count if peers.rank == 0 else 0)), remark


def notes(training: TrainingConfig, device: str) -> list[str]:
    """What is true of these settings on `device` and that they do not say."""
    if training.offload and device == "cpu":
        return [
            "training.offload=true: on a CPU the memory of the host is the same memory, so it saves nothing"
        ]
    return []
