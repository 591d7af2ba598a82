"""What the user can mend. Anything else that is raised is a fault of ours and shows its traceback.

A message names the key to type, the value given, what is allowed and what to do.
"""

from collections.abc import Iterable, Sequence


class AppError(Exception):
    """A problem, or several of one kind, that the user can mend; reported without a traceback."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def report(self) -> str:
        """The whole message as it is printed: one line, or a numbered list."""
        if len(self.problems) == 1:
            return f"error: {self.problems[0]}"
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return f"error: {len(self.problems)} problems\n{listed}"


class ConfigError(AppError):
    """A key, a value, or a combination of them that cannot work."""


def refuse(problems: Iterable[str]) -> None:
    """One ConfigError with all of them, if there are any."""
    found = list(problems)
    if found:
        raise ConfigError(found)


class DataError(AppError):
    """A row, a file or a dataset that cannot be trained on."""


class EnvironmentProblem(AppError):  # noqa: N818 (EnvironmentError is Python's own)
    """Something outside the configuration is missing: a file, a package, a device, a network, disk space."""


class CheckpointError(AppError):
    """A checkpoint or run folder that cannot be read, trusted or continued."""


class Unfinished(AppError):  # noqa: N818 (no fault: what was saved goes on)
    """A run that goes on when it is started again."""

    exit_code = 75


class TrainingError(AppError):
    """The training itself cannot go on: gradients that stay non-finite."""
