"""What rooms without a console say while they work (data that takes minutes), said by the one of the command."""

import logging

from app.record.console import Console


class _Hearing(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One line, as all others."""
        self._console.say(record.getMessage())


def hear(console: Console) -> None:
    """From now on; Hydra would write the same into a file of its own."""
    ours = logging.getLogger("app")
    ours.handlers[:] = [_Hearing(console)]
    ours.setLevel(logging.INFO)
    ours.propagate = False
