"""Install the program beside what NVIDIA's PyTorch image has, and prove that torch and its kin stayed as they were.

python scripts/image/install.py                    what the Dockerfile does
python scripts/image/install.py --plan PLAN.json   only work out what it would do, and write it down

It needs pip and the standard library: whatever else it imported, it might be about to replace.

What the image has stays, if it will do: pip keeps it. What is missing comes in the version of constraints.txt, and
what is too old for these is replaced, at most by that version, and named. What PROTECTED names is never touched.
The image's own constraint file (PIP_CONSTRAINT) is no help in this: where NVIDIA filled it, it pins everything, and
some of it is older than we need, so that pip would find no solution. pip works without it; it is renewed at the end.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
EXTRAS = "tensorboard"
# Built by NVIDIA for this image and for each other: another build of any of them breaks the rest.
PROTECTED = re.compile(r"(py)?torch|triton|nvidia-|cuda-|flash-attn|transformer-engine|tensorrt|apex$")


class InstallError(Exception):
    """What the build ends with instead of an image that is broken."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Packages and versions by canonical name; `replaced` has the image's version and the new one."""

    new: dict[str, str]
    replaced: dict[str, tuple[str, str]]

    @property
    def installed(self) -> dict[str, str]:
        """Everything that pip will install."""
        return self.new | {name: version for name, (_, version) in self.replaced.items()}


def canonical(name: str) -> str:
    """As indexes spell it: `Flash_Attn` is `flash-attn`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def present() -> dict[str, str]:
    """What this interpreter has. Of two copies the one that is imported counts, which is the first."""
    importlib.invalidate_caches()
    found: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonical(name), distribution.version)
    return found


def protected(packages: Mapping[str, str]) -> dict[str, str]:
    """Those of `packages` that must stay."""
    return {name: version for name, version in packages.items() if PROTECTED.match(name)}


def pins(lines: Iterable[str]) -> dict[str, str]:
    """The exact versions in a constraint file."""
    found = (re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*==\s*([^\s;#]+)", line) for line in lines)
    return {canonical(match[1]): match[2] for match in found if match}


def constraints(have: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What pip must keep to, given what the image has and what we pin."""
    lines = [f"{name}=={version}" for name, version in protected(have).items()]
    for name, pin in ours.items():
        if name not in have:
            lines.append(f"{name}=={pin}")
        elif _release(have[name]) < _release(pin):
            lines.append(
                f"{name}<={pin}"
            )  # pip prefers what is installed, and after it the newest, which is ours
    return lines


def _release(version: str) -> list[int]:
    """Good enough to order two releases; the rest of a version is not compared."""
    public = version.partition("+")[0]
    return [int(number) for number in re.findall(r"\d+", public)]


def plan_of(report: Path, have: Mapping[str, str]) -> Plan:
    """From pip's report; what must not be touched is refused here."""
    items = json.loads(report.read_text("utf-8"))["install"]
    found = {canonical(item["metadata"]["name"]): str(item["metadata"]["version"]) for item in items}
    if touched := protected(found):
        told = [
            f"{name} {version} (the image has {have.get(name, 'none')})" for name, version in touched.items()
        ]
        raise InstallError(f"these would be installed over what belongs to the image: {', '.join(told)}")
    return Plan(
        new={name: version for name, version in found.items() if name not in have},
        replaced={name: (have[name], version) for name, version in found.items() if name in have},
    )


def install(project: Path, plan_file: Path | None) -> None:
    """Resolve, check, and unless only a plan is asked for, install exactly what was checked."""
    have = present()
    if "torch" not in have:
        raise InstallError(f"{sys.executable} has no torch: this is for images that bring their own")
    ours = pins((project / "constraints.txt").read_text("utf-8").splitlines())
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _built(project, Path(scratch))
        plan = _resolved(wheel, constraints(have, ours), have, project)
        print(_told(plan, have, ours), flush=True)
        if plan_file:
            plan_file.write_text(json.dumps(asdict(plan), indent=2) + "\n", "utf-8")
            return
        _carry_out(plan, wheel, project)
    now = present()
    if changed := {name for name, _ in protected(now).items() ^ protected(have).items()}:
        raise InstallError(f"changed by the installation: {', '.join(sorted(changed))}")
    if path := os.environ.get("PIP_CONSTRAINT"):
        _renew(Path(path), plan, now)


def _built(project: Path, folder: Path) -> Path:
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(project), project=project)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _resolved(wheel: Path, limits: list[str], have: Mapping[str, str], project: Path) -> Plan:
    listed, report = wheel.with_name("limits.txt"), wheel.with_name("report.json")
    listed.write_text("\n".join(limits) + "\n", "utf-8")
    ours = f"{wheel.name.split('-')[0]}[{EXTRAS}] @ {wheel.as_uri()}"
    dry = ("--dry-run", "--report", str(report))
    _pip("install", *dry, "--constraint", str(listed), ours, project=project)
    return plan_of(report, have)


def _carry_out(plan: Plan, wheel: Path, project: Path) -> None:
    ours = canonical(wheel.name.split("-")[0])
    exact = [f"{name}=={version}" for name, version in plan.installed.items() if name != ours]
    listed = wheel.with_name("exact.txt")
    listed.write_text("\n".join(exact) + "\n", "utf-8")
    _pip("install", "--no-deps", "--requirement", str(listed), str(wheel), project=project)


def _pip(*arguments: str, project: Path) -> None:
    """In the project's folder: pip splits PIP_BUILD_CONSTRAINT at spaces, so the path in it must have none."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    environment |= {"PIP_BUILD_CONSTRAINT": "constraints.txt", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    command = [sys.executable, "-m", "pip", *arguments]
    code = subprocess.run(command, cwd=project, env=environment, check=False).returncode
    if code:
        raise InstallError(f"pip {arguments[0]} ended with {code}; its last lines say why")


def _told(plan: Plan, have: Mapping[str, str], ours: Mapping[str, str]) -> str:
    lines = [f"untouched: {name} {version}" for name, version in sorted(protected(have).items())]
    lines += [
        f"kept: {name} {have[name]}, where constraints.txt has {pin}"
        for name, pin in sorted(ours.items())
        if have.get(name, pin) != pin and name not in plan.replaced and not PROTECTED.match(name)
    ]
    lines += [f"replaced: {name} {old} -> {new}" for name, (old, new) in sorted(plan.replaced.items())]
    return "\n".join([*lines, f"new: {len(plan.new)} packages"])


def _renew(path: Path, plan: Plan, now: Mapping[str, str]) -> None:
    """Whatever is installed later, in an image made from this one, shall keep to what is there now."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    held = protected(now) | {name: now[name] for name in plan.installed}
    lines = [line for line in lines if not held.keys() & pins([line]).keys()]
    lines += [f"{name}=={version}" for name, version in sorted(held.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", type=Path, metavar="FILE", help="install nothing; write what would be")
    parser.add_argument(
        "--project", type=Path, default=PROJECT, help="the folder with pyproject.toml and constraints.txt"
    )
    arguments = parser.parse_args()
    try:
        install(arguments.project.resolve(), arguments.plan)
    except InstallError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
