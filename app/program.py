"""How this program was started, for the commands that it prints."""

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
# A printed command names the source, format and columns itself; the others are not settings of a check of data.
_NOT_REPEATED = re.compile(
    r"dataset(=|\.(path|split|hub_config|revision|format|columns|leave_out|mix)\b)"
    r"|(output_dir|resume|dry_run|hardware|exact|answers)\b"
)


def remember_settings(arguments: Sequence[str]) -> None:
    """Keep the settings of a command line for the commands that this process and its children print."""
    settings = [word for word in arguments if "=" in word and word[0] not in "-~"]
    os.environ[TYPED] = shlex.join(word for word in settings if not _NOT_REPEATED.match(word.lstrip("+")))


def as_started(text: str) -> str:
    """Return the text with each printed command as the user would type it: `finetune train` for `python -m app.train`
    where that was typed, and checks of data with the settings that were typed.
    """
    text = _CHECK.sub(_with_settings, text)
    name = os.environ.get(STARTED_AS)
    return _MODULE.sub(f"{name} ", text) if name else text


def _with_settings(command: re.Match[str]) -> str:
    """Return the command with the typed settings that it does not change."""
    settings = shlex.split(os.environ.get(TYPED, ""))
    typed, words = [*map(_key, settings)], re.findall(_WORD, command[2])
    if "recipe" in typed:  # which learns from the format already, and may be another than the first that does
        words = [word for word in words if _key(word) != "recipe"]
    changed = [*map(_key, words)]
    repeated = [shlex.quote(word) for word, key in zip(settings, typed, strict=True) if key not in changed]
    return " ".join([command[1], *repeated, *words])


def _key(word: str) -> str:
    return word.lstrip("+'\"").partition("=")[0]
