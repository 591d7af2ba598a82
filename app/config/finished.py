"""The configuration of a run that was made, with what a later command may change of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from app.config.groups import choices_by_group
from app.config.load import resolved, section_of
from app.config.overrides import check_overrides
from app.config.schema import AttentionConfig, RunConfig
from app.config.strict import is_key, kinds
from app.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Changes:
    """What a command line sets: choices by their group, values by their dotted key."""

    choices: dict[str, str]
    values: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.choices or name in self.values


def read_changes(
    arguments: Sequence[str], schema: type[RunConfig], may: Sequence[str], why_not: Mapping[str, str]
) -> Changes:
    """Checked as app.train checks its own. Of `schema` only what `may` names, or lies in a section that it names, is
    taken: the rest would change nothing, so it is refused, with the reason that `why_not` has for its section.
    """
    problems, others = [], []
    for text in arguments:
        key = text.partition("=")[0].lstrip("+~")
        known = key in choices_by_group() or is_key(schema, key) or key.partition(".")[0] == "hydra"
        if known and not _named(key, may):
            reason = next(why_not[place] for place in _places(key) if place in why_not)
            problems.append(f"{text}: {key} does not apply, {reason}.")
        else:
            others.append(text)
    try:
        overrides = check_overrides(others, schema)
    except ConfigError as found:
        problems += found.problems
    if problems:
        raise ConfigError(problems)
    return _sorted_out(overrides, schema)


def finished_folder(given: str | None) -> Path:
    """The folder of `run=`, if the run in it came to its end."""
    folder = run_folder(given)
    if not (folder / "final").is_dir():
        raise CheckpointError(
            f"run={given}: there is no final/ in it, so the run did not finish. "
            f"Finish it with python -m app.train ... output_dir={given} resume=auto"
        )
    return folder


def run_folder(given: str | None) -> Path:
    """The folder of `run=`."""
    if given is None:
        raise ConfigError("run has no value. Give run=DIR, the output_dir of a run.")
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"run={given}: there is no such folder. Give the output_dir of a finished run.")
    return folder


def settled(run: RunConfig, choices: Mapping[str, Any]) -> RunConfig:
    """The run with what was left to the machine as it was when the run was made; `choices` are of its manifest."""
    if run.precision.kind == "auto" and "precision" in choices:
        run = replace(run, precision=replace(run.precision, kind=choices["precision"]))
    if run.attention.kind == "auto" and "attention" in choices:
        run = replace(run, attention=AttentionConfig(kind=choices["attention"]))
    # on a CPU their number may move the last bits
    if run.launch.threads is None and choices.get("device") == "cpu":
        run = replace(run, launch=replace(run.launch, threads=choices["threads"]))
    return run


def changed(data: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The plain data of a run with `changes`; a chosen group replaces its section."""
    chosen = {group: section_of(group, choice) for group, choice in changes.choices.items()}
    config = OmegaConf.create({**data, **chosen})
    for key, value in changes.values.items():
        OmegaConf.update(config, key, value, merge=True)
    return resolved(config)


def as_run(config: RunConfig) -> RunConfig:
    """Without the keys that belong to a command."""
    return RunConfig(**{each.name: getattr(config, each.name) for each in fields(RunConfig)})


def plain(run: RunConfig) -> dict[str, Any]:
    """As it stands in a run.yaml."""
    return asdict(run)


def _named(key: str, names: Sequence[str]) -> bool:
    return any(place in names for place in _places(key))


def _places(key: str) -> list[str]:
    """The key and the sections around it, innermost first; the whole is the empty one."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _sorted_out(overrides: Sequence[str], schema: type) -> Changes:
    parse = OverridesParser.create().parse_override
    changes = Changes({}, {})
    for override in map(parse, overrides):
        name, value = override.key_or_group, override.value()
        if name in choices_by_group() and isinstance(value, str):
            changes.choices[name] = value
        else:
            changes.values.update(_flat(name, value, schema))
    return changes


def _flat(key: str, value: Any, schema: type) -> dict[str, Any]:
    """`dataset={path: x}` is `dataset.path=x`."""
    if not isinstance(value, dict) or not is_dataclass(kinds(schema).get(key)):
        return {key: value}
    return {k: v for name, inner in value.items() for k, v in _flat(f"{key}.{name}", inner, schema).items()}
