"""Commands that are shown to be typed again: as they must be typed here and now."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_REPLACED = frozenset({"output_dir", "resume"})


def python() -> str:
    """The program's interpreter need not be the one of the shell."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path.cwd()
    own = Path(sys.executable)
    return str(own.relative_to(here)) if own.is_relative_to(here) else str(own)


def how_to_go_on(words: Sequence[str], output_dir: str) -> str:
    """For a run that `words` started; all of them stay, because a checkpoint is that of the same settings."""
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in _REPLACED]
    command = [python(), "-m", "app.train", *kept, f"output_dir={output_dir}", "resume=auto"]
    return f"To go on:\n{shlex.join(command)}"


def how_to_go_on_elsewhere() -> str:
    """For a run that another launcher started: its command is not known here."""
    return "To go on, start the same command with resume=auto."
