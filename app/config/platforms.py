"""Where the program runs; elsewhere it says so instead of failing in the middle."""

import platform

from app.errors import EnvironmentProblem

_MACHINES = ("x86_64", "aarch64")
_ADVICE = {
    "Darwin": "macOS is not supported: use a Linux machine.",
    "Windows": "Windows is not supported: install WSL 2 (wsl --install) and run this inside it.",
}


def require_platform(system: str | None = None, machine: str | None = None) -> None:
    """Linux on x86-64 or aarch64; the arguments stand for another machine's."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux":
        raise EnvironmentProblem(_ADVICE.get(system, f"{system} is not supported: use a Linux machine."))
    if machine not in _MACHINES:
        raise EnvironmentProblem(f"Linux on {machine} is not supported: x86-64 and aarch64 are.")
