"""A run as it is read afterwards."""

from typing import Any

from app.errors import CheckpointError, ConfigError
from app.record.folder import RunFolder
from app.record.metrics import read_lines


def logged_lines(folder: RunFolder, steps: int | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, up to `steps` if given; there is one at least."""
    missing = [file.name for file in (folder.manifest, folder.metrics) if not file.is_file()]
    lines = [] if missing else list(read_lines(folder.metrics))
    if not lines:
        why = f"there is no {' and no '.join(missing)} in it" if missing else "no step of it was logged"
        raise CheckpointError(f"run={folder.path}: {why}, so there is nothing to compare with.")
    wanted = [line for line in lines if steps is None or line["step"] <= steps]
    if not wanted:
        first = lines[0]["step"]
        raise ConfigError(
            f"steps={steps}: the first line of {folder.metrics} is of step {first}. Give steps={first} or more."
        )
    return wanted
