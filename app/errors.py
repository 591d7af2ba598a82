"""Errors that the user can solve; any other exception is a bug and shows its traceback.

A message names the key to type, the value given, the cause and the remedy.
"""

from collections.abc import Iterable, Sequence

from app.program import as_started
from app.safe_text import safe_text
from app.signals import START_ME_AGAIN


class AppError(Exception):
    """One or several problems that the user can solve, reported without a traceback."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def report(self) -> str:
        """The message to print, without secrets and control characters: one line, or a numbered list."""
        if len(self.problems) == 1:
            return safe_text(as_started(f"error: {self.problems[0]}"))
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return safe_text(as_started(f"error: {len(self.problems)} problems\n{listed}"))


class ConfigError(AppError):
    """A key, a value, or a combination of them that cannot work."""


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    found = list(problems)
    if found:
        raise ConfigError(found)


def gist(fault: BaseException) -> str:
    """Another library's error in a line, for a message of ours; a compiler's begins with a place in its source."""
    message = getattr(fault, "error_message", None) or fault
    return " ".join(str(message).split())[:300] or type(fault).__name__


def first_line(fault: BaseException) -> str:
    """The first line of an error's text."""
    return str(fault).strip().partition("\n")[0]


class PromptTooLong(ConfigError):  # noqa: N818 (a conversation goes on after it)
    """A prompt with more tokens than the model has positions."""


class DataError(AppError):
    """A row, a file or a dataset that cannot be trained on."""


class EnvironmentProblem(AppError):  # noqa: N818 (EnvironmentError is Python's own)
    """Something outside the configuration is missing: a file, a package, a device, a network, disk space."""


class CheckpointError(AppError):
    """A checkpoint or run folder that cannot be read, trusted or continued."""


class Unfinished(AppError):  # noqa: N818 (no fault: what was saved goes on)
    """A run that was saved and continues when it is started again."""

    exit_code = START_ME_AGAIN


class TrainingError(AppError):
    """Training that cannot continue, such as gradients that stay non-finite."""
