"""What can be wrong with a Dockerfile that nobody here can build: read as docker does, compared with the files."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

KNOWN = frozenset(
    {"ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """`RUN` and what follows it, continued lines joined."""

    name: str
    text: str


def instructions(dockerfile: str) -> list[Instruction]:
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def complaints(dockerfile: str, root: Path) -> list[str]:
    """Everything that is wrong, given the folder that it is built in."""
    steps = instructions(dockerfile)
    return [
        *(
            f"{step.name}: unknown, or with another meaning than here"
            for step in steps
            if step.name not in KNOWN
        ),
        *_base(steps),
        *_sources(steps, root),
        *_variables(steps),
        *_ending(steps),
    ]


def _base(steps: list[Instruction]) -> Iterator[str]:
    (name, image) = next(((i, step.text) for i, step in enumerate(steps) if step.name == "FROM"), (0, ""))
    if not re.fullmatch(r"nvcr\.io/nvidia/pytorch:\$\{(\w+)\}", image):
        yield f"FROM {image}: not NVIDIA's image with a tag to choose"
    before = arguments(steps[:name])
    for variable in re.findall(r"\$\{(\w+)\}", image):
        if not re.fullmatch(r"\d\d\.\d\d-py3", before.get(variable, "")):
            yield f"FROM {image}: {variable} has no release of the image as its default"


def arguments(steps: list[Instruction]) -> dict[str, str]:
    """The names and defaults of ARG."""
    split = (step.text.partition("=") for step in steps if step.name == "ARG")
    return {name: default for name, _, default in split}


def _sources(steps: list[Instruction], root: Path) -> Iterator[str]:
    rules = (root / ".dockerignore").read_text().splitlines()
    for step in steps:
        for source in step.text.split()[:-1] if step.name == "COPY" else ():
            if not (root / source).exists():
                yield f"COPY {source}: there is no such file"
            elif ignored(source, rules):
                yield f"COPY {source}: .dockerignore keeps it out"


def ignored(path: str, rules: list[str]) -> bool:
    """The last rule that fits the path, or a folder it is in, decides."""
    verdict = False
    parts = PurePosixPath(path)
    tried = [str(p) for p in (parts, *parts.parents) if str(p) != "."]
    for rule in (rule for rule in rules if rule and not rule.startswith("#")):
        pattern = rule.removeprefix("!").removeprefix("**/")
        names = [PurePosixPath(p).name for p in tried] if "**/" in rule else tried
        if any(p.count("/") == pattern.count("/") and fnmatchcase(p, pattern) for p in names):
            verdict = not rule.startswith("!")
    return verdict


def _variables(steps: list[Instruction]) -> Iterator[str]:
    """Each `${NAME}` after FROM is declared before it is used: an ARG from above FROM does not reach further."""
    declared: set[str] = set()
    inside = False
    for step in steps:
        if inside:
            unknown = set(re.findall(r"\$\{?(\w+)", step.text)) - declared
            yield from (f"{step.name}: {name} is used before it is declared" for name in sorted(unknown))
        inside = inside or step.name == "FROM"
        if inside and step.name == "ARG":
            declared |= arguments([step]).keys()
        elif inside and step.name == "ENV":
            declared |= environment([step]).keys()


def environment(steps: list[Instruction]) -> dict[str, str]:
    """What ENV sets, in the form NAME=value."""
    texts = " ".join(step.text for step in steps if step.name == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", texts))


def _ending(steps: list[Instruction]) -> Iterator[str]:
    last = {step.name: step.text for step in steps}
    user = last.get("USER", "root")
    user = arguments(steps).get(user.strip("${}"), user)
    if not user.isdigit() or int(user) == 0:
        yield f"USER {user}: the program would run as root, or as somebody whom a cluster cannot check"
    for name in ("ENTRYPOINT", "VOLUME"):
        try:
            json.loads(last.get(name, ""))
        except ValueError:
            yield f"{name} {last.get(name)}: not a list, so a shell would stand between docker and the program"
    if "PIP_CONSTRAINT" not in environment(steps):
        yield "PIP_CONSTRAINT is not kept, so that what is installed later may replace torch"
