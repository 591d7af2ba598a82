"""Plan of a measurement session: items that run at the same time, then turns with exclusive use of the device."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.contest import METHODS, SHAPES, Contest
from scripts.bench.frameworks import FRAMEWORKS, is_framework

PHASES = ("beside", "turns")
_CONTEST = {field.name for field in fields(Contest)}
_REQUIRED = {field.name for field in fields(Contest) if field.default is MISSING} - {"device"}
_ITEM = {"seconds", "limit"}
_COMMAND = _ITEM | {"name", "command", "tiny"}
_TINY: dict[str, Any] = {
    "model": "tiny",
    "mix": "short",
    "length": 32,
    "tokens_per_step": 64,
    "steps": 1,
    "warm_up": 1,
    "threads": 1,
}
_TINY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A contest or a command; it usually takes `seconds` and is killed after `limit`."""

    name: str
    seconds: float
    limit: float
    threads: int
    contest: Contest | None = None
    command: tuple[str, ...] = ()  # words with {python}, {device}, {lines} and {seconds}


@dataclass(frozen=True, slots=True)
class Plan:
    """`turns` are in order of importance; the first contest is repeated as the last turn."""

    beside: list[Item]
    turns: list[Item]

    @property
    def first(self) -> Item | None:
        """The first contest."""
        return next((item for item in self.turns if item.contest), None)

    @property
    def repeated(self) -> Item | None:
        """The first contest again, to measure the noise."""
        first = self.first
        if first is None or first.contest is None:
            return None
        return replace(first, name=f"{first.name}, repeated", contest=replace(first.contest, turn=1))


def read_plan(file: Path, device: str, *, tiny: bool) -> Plan:
    """Read a plan, or exit with all its problems."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    problems = [f"{file}: {problem}" for problem in _problems(content)]
    if problems:
        raise SystemExit("\n".join(problems))
    common = content["contest"] | {"device": device}
    return Plan(
        *([_item(values, common, content[phase], tiny) for values in content[phase]["items"]] for phase in PHASES)
    )


def _item(values: dict[str, Any], common: dict[str, Any], phase: dict[str, Any], tiny: bool) -> Item:
    seconds = min(values["seconds"], _TINY_SECONDS) if tiny else values["seconds"]
    limit, common = values.get("limit", phase["limit"]), common | phase.get("contest", {})
    if "command" in values:
        words = tuple(shlex.split(f"{values['command']} {values.get('tiny', '') if tiny else ''}"))
        return Item(name=values["name"], seconds=seconds, limit=limit, threads=common["threads"], command=words)
    contest = _contest(values, common, tiny)
    parts = [contest.framework, contest.model, contest.method, *contest.settings]
    name = " ".join([*parts, *(["recompute"] if contest.recompute else [])])
    return Item(name=name, seconds=seconds, limit=limit, threads=contest.threads, contest=contest)


def _contest(values: dict[str, Any], common: dict[str, Any], tiny: bool) -> Contest:
    item = {name: value for name, value in values.items() if name in _CONTEST}
    settings = (*common.get("settings", ()), *item.get("settings", ()))
    contest = Contest(**{**common, **item, **(_TINY if tiny else {}), "settings": settings})
    if contest.device == "cpu":
        contest = replace(contest, precision="fp32")
    if contest.device == "cpu" and tiny:  # a C++ compiler takes minutes
        contest = replace(
            contest, framework=contest.framework.replace("compile=blocks", "compile=blocks,compile.backend=aot_eager")
        )
    return contest


def _problems(content: Any) -> Iterator[str]:
    if not isinstance(content, dict) or content.keys() != {"contest", *PHASES}:
        yield f"a plan has the keys contest, {' and '.join(PHASES)}"
        return
    for phase in PHASES:
        section = content[phase]
        if not isinstance(section, dict) or not {"limit", "items"} <= section.keys() <= {"limit", "items", "contest"}:
            yield f"{phase} has the keys limit, items and, optionally, contest"
            continue
        for number, values in enumerate(section["items"], 1):
            common = content["contest"] | section.get("contest", {})
            yield from (f"{phase}, item {number}: {problem}" for problem in _problems_of_item(values, common))


def _problems_of_item(values: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[str]:
    is_command = "command" in values
    required = {"name", "seconds"} if is_command else {"seconds"}
    allowed = _COMMAND if is_command else _CONTEST | _ITEM
    contest = {} if is_command else {**common, **{key: value for key, value in values.items() if key in _CONTEST}}
    missing = (required - values.keys()) | (set() if is_command else _REQUIRED - contest.keys())
    unknown = (values.keys() - allowed) | (contest.keys() - _CONTEST)
    if missing:
        yield f"missing: {', '.join(sorted(missing))}"
    if unknown:
        yield f"unknown: {', '.join(sorted(unknown))}"
    if missing or unknown or is_command:
        return
    if not is_framework(contest["framework"]):
        yield f"framework {contest['framework']}: choose one of {', '.join(FRAMEWORKS)}, ours:KEY=VALUE"
    for key, choices in (("model", SHAPES), ("method", METHODS)):
        if contest[key] not in choices:
            yield f"{key} {contest[key]}: choose one of {', '.join(choices)}"
