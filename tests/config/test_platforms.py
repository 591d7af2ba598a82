"""Other platforms are refused by name."""

import pytest

from app.config.commands import require_platform
from app.errors import EnvironmentProblem


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_is_where_it_runs(machine: str) -> None:
    assert require_platform("Linux", machine) is None  # type: ignore[func-returns-value]
    assert require_platform() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("Windows", "AMD64", "WSL 2"),
        ("Darwin", "arm64", "macOS is not supported"),
        ("FreeBSD", "amd64", "FreeBSD is not supported"),
        ("Linux", "riscv64", "Linux on riscv64 is not supported"),
    ],
)
def test_others_are_refused_by_name(system: str, machine: str, words: str) -> None:
    with pytest.raises(EnvironmentProblem, match=words):
        require_platform(system, machine)
