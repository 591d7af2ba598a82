"""Errors that the user can fix; any other exception is a bug and shows its traceback.

A message names the key, its value, the cause and the fix.
"""

from collections.abc import Iterable, Sequence

from app.program import as_started
from app.safe_text import safe_text
from app.signals import START_ME_AGAIN


class AppError(Exception):
    """One or more problems that the user can fix, reported without a traceback."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def report(self) -> str:
        """Return the message without secrets and control characters: one line, or a numbered list."""
        if len(self.problems) == 1:
            return safe_text(as_started(f"error: {self.problems[0]}"))
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return safe_text(as_started(f"error: {len(self.problems)} problems\n{listed}"))


class ConfigError(AppError):
    """Invalid key, value, or combination of settings."""


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    messages = list(problems)
    if messages:
        raise ConfigError(messages)


def gist(fault: BaseException) -> str:
    """Return an error of another library in one line, without the source location of a compiler."""
    message = getattr(fault, "error_message", None) or fault
    return " ".join(str(message).split())[:300] or type(fault).__name__


def first_line(fault: BaseException) -> str:
    """Return the first line of an error message."""
    return str(fault).strip().partition("\n")[0]


class PromptTooLong(ConfigError):  # noqa: N818 (a chat continues after it)
    """Prompt with more tokens than the model has positions."""


class DataError(AppError):
    """Row, file or dataset that is not usable for training."""


class EnvironmentProblem(AppError):  # noqa: N818 (EnvironmentError is Python's own)
    """Missing file, package, device, network connection or disk space."""


class CheckpointError(AppError):
    """Checkpoint or run folder that cannot be read, verified or resumed."""


class Unfinished(AppError):  # noqa: N818 (not an error: the saved run can be resumed)
    """Interrupted run that was saved and can be resumed."""

    exit_code = START_ME_AGAIN


class TrainingError(AppError):
    """Training failure, such as consecutive non-finite gradients."""
