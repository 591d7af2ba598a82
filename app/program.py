"""How this program was started, for the commands that it prints."""

import os
import re

STARTED_AS = "APP_STARTED_AS"  # in the environment, so that child processes print the same commands
_MODULE = re.compile(r"\S*\bpython[\d.]*'? -m app\.(?=\w)")


def as_started(text: str) -> str:
    """The text with each `python -m app.train` as the user types it: `finetune train` where that was typed."""
    name = os.environ.get(STARTED_AS)
    return _MODULE.sub(f"{name} ", text) if name else text
