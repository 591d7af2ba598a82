"""Where a run starts: from its own checkpoint, from a checkpoint of another run, or from step 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.distributed.environment import world
from app.training.checkpoint import choices_of, find_checkpoint


@dataclass(frozen=True, slots=True)
class Start:
    """Checkpoint to resume from, None for a new run, and `choices`: the values of `auto` when the run first started."""

    checkpoint: Path | None
    choices: Mapping[str, str]
    remarks: tuple[str, ...] = ()  # on damaged checkpoints

    def kept_with_run(self, folder: Path) -> Path:
        """Return the folder; that of the checkpoint's run, if the run continues elsewhere and has no copy yet."""
        return folder if folder.is_dir() or not self.checkpoint else self.checkpoint.parents[1] / folder.name


def find_start(checkpoints: Path, resume: str | None) -> Start:
    """Find the checkpoint to resume from, if any."""
    checkpoint, remarks = find_checkpoint(checkpoints, resume, tidy=world().is_first)
    return Start(checkpoint, choices_of(checkpoint), tuple(remarks))
