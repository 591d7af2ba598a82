"""Start command of the program, for the commands that it prints."""

import os
import re
import shlex
from collections.abc import Sequence

# In the environment, so that child processes print the same commands.
STARTED_AS = "APP_STARTED_AS"
TYPED = "APP_TYPED"
_MODULE = re.compile(r"\S*\bpython[\d.]*'? -m app\.(?=\w)")
_WORD = r"""(?:'[^'\n]*'|"[^"\n]*"|[^\s'"])+"""
_CHECK = re.compile(rf"(python -m app\.check data)((?: (?=['\"]?[\w.]+=){_WORD})+)")
# Printed commands contain source, format and columns; the other settings are not accepted by `app.check data`.
_NOT_REPEATED = re.compile(
    r"dataset(=|\.(path|split|hub_config|revision|format|columns|leave_out|mix)\b)"
    r"|(output_dir|resume|dry_run|hardware|exact|answers)\b"
)


def remember_settings(arguments: Sequence[str]) -> None:
    """Store the settings of a command line for the commands that this process and its children print."""
    settings = [word for word in arguments if "=" in word and word[0] not in "-~"]
    os.environ[TYPED] = shlex.join(word for word in settings if not _NOT_REPEATED.match(word.lstrip("+")))


def as_started(text: str) -> str:
    """Rewrite the commands in a text as the user types them: `finetune train` for `python -m app.train`, and the typed
    settings added to data checks.
    """
    text = _CHECK.sub(_with_settings, text)
    name = os.environ.get(STARTED_AS)
    return _MODULE.sub(f"{name} ", text) if name else text


def _with_settings(command: re.Match[str]) -> str:
    """Add the typed settings to a command, except those that it changes."""
    settings = shlex.split(os.environ.get(TYPED, ""))
    typed, words = [*map(_key, settings)], re.findall(_WORD, command[2])
    if "recipe" in typed:  # the typed recipe supports the format and may differ from the suggested one
        words = [word for word in words if _key(word) != "recipe"]
    changed = [*map(_key, words)]
    repeated = [shlex.quote(word) for word, key in zip(settings, typed, strict=True) if key not in changed]
    return " ".join([command[1], *repeated, *words])


def _key(word: str) -> str:
    return word.lstrip("+'\"").partition("=")[0]
