"""What a trial prints: followed while it runs, and searched for the reason when it failed."""

import signal
from pathlib import Path

_LONGEST_REASON = 12
_STEP = "step "


class Printed:
    """The part of a file that is written from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = self._seen = path.stat().st_size if path.exists() else 0
        self._latest = "starting"

    def text(self) -> str:
        """All of it."""
        return self._since(self._begin).decode("utf-8", "replace")

    def latest(self) -> str:
        """The line to show: the newest step, or what is said before the first one."""
        whole, newline, _ = self._since(self._seen).rpartition(b"\n")
        self._seen += len(whole) + len(newline)
        lines = whole.decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.startswith(_STEP)]
        if steps or (lines and not self._latest.startswith(_STEP)):
            self._latest = (steps or lines)[-1]
        return self._latest

    def _since(self, place: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(place)
            return file.read()


def reason(exit_code: int, text: str) -> str:
    """Why it failed, in a few lines."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    lines = text.rstrip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :][:_LONGEST_REASON])
    return lines[-1] if lines else "it said nothing"
