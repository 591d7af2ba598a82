"""The words of the command line: Hydra's switches, and overrides, checked against conf/ and the schema before Hydra
composes anything.
"""

import shlex
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # Hydra's own decides, so that both always agree
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config.did_you_mean import did_you_mean, did_you_mean_key, nearest_keys
from app.config.groups import choices_by_group
from app.config.validate import is_key, is_optional, is_text, kinds, shown
from app.errors import ConfigError, refuse

# there is one tree of configurations, and it is checked; `rerun` would unpickle a file
_OTHER_ROOTS = ("config_path", "config_name", "config_dir", "experimental_rerun")
_CAN_BE_ABSENT = ("experiment", "debug")  # groups without a choice unless one is made
# choices that other programs have
_NOT_OFFERED = {
    "parallel=deepspeed": (
        "DeepSpeed is not offered, because it brings an optimizer, clipping and checkpoints of its own, and its ZeRO-3 "
        "cannot differentiate the loss head. Choose parallel=zero2 or zero3, which torch's FSDP2 does, and "
        "parallel.offload=true for the memory of the host."
    ),
    "parallel=megatron": (
        "Megatron is not offered, because it trains models that are written for it, and PEFT's adapters break on "
        "layers that are divided by rows. Choose parallel=fsdp, or hsdp on several machines."
    ),
}


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether `-m` is among them; words that cannot be read at all are reported as those of a run."""
    try:
        return bool(_read(arguments)[0].multirun)
    except ConfigError:
        return False


def split_words(arguments: Sequence[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The settings among `arguments`, and the switches; ConfigError for one that this program does not have, or that
    a sweep does not go with.
    """
    known, overrides, problems = _read(arguments)
    switches = [word for word in arguments if word not in overrides]
    others = [word for word in switches if word not in ("-m", "--multirun")]
    if sweep and others and not problems:
        problems.append(
            f"{' '.join(others)} does not go with -m, because it is about one run. Leave out one of them; "
            "dry_run=true tells the plan of every trial."
        )
    if known.multirun and not sweep:
        problems.append("-m starts a sweep, and this is one run. Leave it out.")
    refuse(problems)
    return overrides, switches


def _read(arguments: Sequence[str]) -> tuple[Namespace, list[str], list[str]]:
    """The switches, the settings, and what is wrong with the switches."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        known, others = parser.parse_known_args(list(arguments))
    except ArgumentError as fault:
        raise ConfigError(f"{fault.argument_name}: {fault.message}.") from None
    problems = []
    for switch in (other for other in others if other.startswith("-")):
        name, _, value = switch.lstrip("-").partition("=")
        setting = f"{name.replace('-', '_')}={value or '...'}"
        problems.append(f"{switch}: there is no such switch. Settings have no dashes in front: {setting}")
    problems += [
        f"--{name.replace('_', '-')} is not in this program: its configurations are the files of conf/. "
        "Choose among them with group=choice; --help lists them."
        for name in _OTHER_ROOTS
        if getattr(known, name) is not None
    ]
    return known, [*known.overrides, *others], problems


def check_overrides(arguments: Sequence[str], schema: type) -> list[str]:
    """The overrides in a form that composes whatever the YAML has (`++`), or one ConfigError with every problem."""
    checked, problems = sort_overrides(arguments, schema)
    refuse(problems)
    return checked


def sort_overrides(arguments: Sequence[str], schema: type) -> tuple[list[str], list[str]]:
    """Those that can be composed, as above, and what is wrong with the others."""
    checked: list[str] = []
    problems: list[str] = []
    for text in arguments:
        try:
            override = _parsed(text, schema)
        except ConfigError as problem:
            problems += problem.problems
            continue
        found = list(_problems(override, text, schema))
        problems += found
        if not found:
            checked.append(_composable(override, schema))
    return checked, problems


def key_of(text: str) -> str:
    """What an override sets: `seed` of `++seed=1`."""
    return text.lstrip("+").partition("=")[0]


def _parsed(text: str, schema: type) -> Override:
    parse = OverridesParser.create().parse_override
    key, equals, value = text.partition("=")
    if not key or not (equals or text.startswith("~")):
        is_run = "run" in kinds(schema) and Path(text).expanduser().is_dir()
        meant = f" Did you mean run={text}?" if is_run else ""
        raise ConfigError(f"{text!r} is not an override. Write key=value or group=choice.{meant}")
    try:
        return parse(text)
    except HydraException as fault:
        if is_text(kinds(schema).get(key_of(text))) and not any(sign in value for sign in "\"'\\,"):
            return parse(f'{key}="{value}"')
        reason = " ".join(str(fault).splitlines()[0].split())
        raise ConfigError(f"{text!r} cannot be read: {reason}. Quote the value: '{key}=\"...\"'.") from None


def _problems(override: Override, text: str, schema: type) -> Iterator[str]:
    key = override.key_or_group
    section = key.partition(".")[0]
    if _is_hydra(key):
        return
    if section == "sweep":
        yield f"{text}: a sweep is several runs, and -m starts those: python -m app.train -m {shlex.quote(text)} ..."
    elif section == "hardware" and section not in kinds(schema):
        asked = f"python -m app.check memory {shlex.quote(text)} ..."
        yield f"{text}: {key} is asked by app.check, not by a run: {asked}"
    elif override.is_delete():
        if key not in _CAN_BE_ABSENT:
            yield f"{text}: nothing can be taken out of a run.{_instead_of_taking_out(key, schema)}"
    elif override.package is not None:
        yield f"{text}: {key} has one place in a run. Write {key}=..."
    elif key not in choices_by_group() and not is_key(schema, key):
        yield _unknown(key, schema)
    else:
        yield from _wrong_value(override, text, schema)


def _wrong_value(override: Override, text: str, schema: type) -> Iterator[str]:
    key = override.key_or_group
    if override.is_sweep_override():
        yield _no_sweep(key, text.partition("=")[2], schema)
    elif key in choices_by_group() and not isinstance(override.value(), dict):
        yield from _wrong_choice(key, override.value())


def _instead_of_taking_out(key: str, schema: type) -> str:
    if is_optional(kinds(schema).get(key)):
        return f" Set {key}=null."
    return f" Set {key}=none." if "none" in choices_by_group().get(key, ()) else ""


def _no_sweep(key: str, value: str, schema: type) -> str:
    kind, meant = kinds(schema).get(key), ""
    if kind == list[str]:
        meant = f" For a list write {key}=[{value}]."
    elif key not in choices_by_group() and is_text(kind):
        meant = f" For text with a comma in it write '{key}=\"{value}\"'."
    return (
        f"{key}={value}: several values are a sweep, which -m starts: python -m app.train -m {key}=...{meant}"
    )


def _wrong_choice(group: str, choice: Any) -> Iterator[str]:
    names = choices_by_group()[group]
    if choice in names or (choice is None and group in _CAN_BE_ABSENT):
        return
    if f"{group}={choice}" in _NOT_OFFERED:
        yield f"{group}={choice}: {_NOT_OFFERED[f'{group}={choice}']}"
        return
    meant = did_you_mean(shown(choice), names, listing=False)
    yield f"{group}={shown(choice)}: there is no such {group}.{meant} Choose one of {', '.join(names)}."


def _unknown(key: str, schema: type) -> str:
    groups = choices_by_group()
    near = nearest_keys(key, {*kinds(schema), *groups})
    if near and near[0] in groups:
        return f"{key} is neither a key nor a group. Did you mean {near[0]}={'|'.join(groups[near[0]])}?"
    return f"{key} is not a key.{did_you_mean_key(key, kinds(schema))}"


def _composable(override: Override, schema: type) -> str:
    """`++` sets a key whether or not the YAML has it; Hydra knows no such form for groups."""
    key, value = override.key_or_group, override.value()
    text = override.input_line or ""
    if _is_hydra(key) or override.is_delete():
        return text
    given = text.partition("=")[2]
    if key in choices_by_group() and not isinstance(value, dict):
        return f"~{key}" if value is None else f"{key}={given}"
    if isinstance(value, int | float) and is_text(kinds(schema).get(key)):
        return f'++{key}="{given}"'  # `model.revision=12e4567` is no number
    return f"++{key}={given}"


def _is_hydra(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
