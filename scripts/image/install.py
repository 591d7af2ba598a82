"""Install the program into NVIDIA's PyTorch image, and check that torch and related packages are unchanged.

python scripts/image/install.py        run by the Dockerfile

It uses only pip and the standard library, because it may replace any other package.

Packages of the image are kept if they are recent enough. Missing packages are installed in the version of
constraints.txt, and older ones are upgraded, at most to that version. Packages that match PROTECTED never change.
The constraint file of the image (PIP_CONSTRAINT) is ignored during installation: where NVIDIA filled it, it pins all
packages, some of them older than required. It is updated at the end.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
EXTRAS = "tensorboard"
# Built by NVIDIA for this image and for one another: replacing one breaks the others.
PROTECTED = re.compile(r"(py)?torch|triton|nvidia-(?!ml-py$)|cuda-|flash-attn|transformer-engine|tensorrt|apex$")


def canonical(name: str) -> str:
    """Return the normalized package name: `flash-attn` for `Flash_Attn`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def present() -> dict[str, str]:
    """Return the installed packages and versions; of two copies the first, which is the imported one."""
    importlib.invalidate_caches()
    packages: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:
            packages.setdefault(canonical(name), distribution.version)
    return packages


def protected(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the packages that must not change."""
    return {name: version for name, version in packages.items() if PROTECTED.match(name)}


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Return the exact versions in a constraint file."""
    matches = (re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*==\s*([^\s;#]+)", line) for line in lines)
    return {canonical(match[1]): match[2] for match in matches if match}


def constraints(have: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return the constraints for pip, from the installed and the pinned versions."""
    lines = [f"{name}=={version}" for name, version in protected(have).items()]
    for name, pin in ours.items():
        if name not in have:
            lines.append(f"{name}=={pin}")
        elif _release(have[name]) < _release(pin):
            lines.append(f"{name}<={pin}")  # pip prefers the installed version, then the newest allowed, the pinned one
    return lines


def _release(version: str) -> list[int]:
    """Return the numbers of a release, to compare two releases; local parts are ignored."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def install(project: Path) -> str | None:
    """Install the program; return a problem, or None."""
    before = present()
    if "torch" not in before:
        return f"{sys.executable} has no torch; use an image with PyTorch"
    ours = pins((project / "constraints.txt").read_text("utf-8").splitlines())
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder) / "limits.txt"
        limits.write_text("\n".join(constraints(before, ours)) + "\n", "utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        # relative, because pip splits PIP_BUILD_CONSTRAINT at spaces
        environment |= {"PIP_BUILD_CONSTRAINT": "constraints.txt", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
        command = [sys.executable, "-m", "pip", "install", "--constraint", str(limits), f".[{EXTRAS}]"]
        code = subprocess.run(command, cwd=project, env=environment, check=False).returncode
    if code:
        return f"pip install failed with exit code {code}; see its last lines"
    after = present()
    for name, version in sorted(after.items() - before.items()):
        print(f"replaced: {name} {before[name]} -> {version}" if name in before else f"new: {name} {version}")
    if changed := {name for name, _ in protected(after).items() ^ protected(before).items()}:
        return f"packages of the image were changed: {', '.join(sorted(changed))}"
    if path := os.environ.get("PIP_CONSTRAINT"):
        _update(Path(path), protected(after) | dict(after.items() - before.items()))
    return None


def _update(path: Path, installed: Mapping[str, str]) -> None:
    """Pin the installed versions for later installations in images based on this one."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    lines = [line for line in lines if not installed.keys() & pins([line]).keys()]
    lines += [f"{name}=={version}" for name, version in sorted(installed.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> int:
    """Install from the folder in the arguments, by default this repository."""
    problem = install(Path(sys.argv[1]).resolve() if sys.argv[1:] else PROJECT)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
