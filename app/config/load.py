"""Composition of conf/ and the command line to a validated RunConfig; changes to the run of a run.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from app.assets import PREFIX
from app.config import conf_files
from app.config.adapters import implied_settings
from app.config.conf_files import literal, read_yaml
from app.config.overrides import (
    RATE,
    check_overrides,
    flat,
    key_of,
    partition_overrides,
    replaced_alternatives,
    values_of,
)
from app.config.rules import problems_of, unread_problems
from app.config.schema import ModelConfig, RunConfig
from app.config.tasks import TASKS
from app.config.validate import RUNS_CODE, SENDS_FILES, format_value, leaf_keys, parse_section, typed_only
from app.errors import CheckpointError, ConfigError, refuse

_VERSION_BASE = "1.3"
_SAMPLE = "asset:sample/"
_PROCESSES = "launch.num_processes"
_OFF = {"model.trust_remote_code": False}  # as in conf/model/_hub.yaml


def _validated(data: Mapping[str, Any], typed: Mapping[str, Any]) -> RunConfig:
    """Validate plain data against the schema and the rules.

    `typed` keys must also have an effect; a key that a rule already reports is not reported twice.
    """
    config = parse_section(RunConfig, data)
    problems = problems_of(config)
    others = {k: v for k, v in typed.items() if not any(text.startswith(f"{k}=") for text in problems)}
    refuse([*problems, *unread_problems(config, others)])
    return config


def _with_matching_eval_rows(run: RunConfig) -> RunConfig:
    """Return the run; raise an error if the eval set is the included sample but the training rows are not."""
    path, held, fmt = run.dataset.path, run.dataset.eval_path, run.dataset.format
    if path is not None and not path.startswith(_SAMPLE) and str(held).startswith(_SAMPLE):
        chosen = "auto" if fmt == "messages" else fmt
        raise ConfigError(
            f"dataset.path={path} would be evaluated on the included sample (dataset.eval_path={held}). Add "
            f"dataset={chosen} to hold out some of your rows, or set dataset.eval_path=FILE."
        )
    return run


def read_run(file: Path) -> RunConfig:
    """Return the run of a run.yaml without checking the rules, some of which apply only at the start of a run."""
    try:
        data = read_yaml(file)
        return parse_section(RunConfig, _without_fused(data) if isinstance(data, dict) else {})
    except (OSError, ValueError, YAMLError, ConfigError) as fault:
        reason = " ".join(fault.problems) if isinstance(fault, ConfigError) else _one_line(fault)
        raise CheckpointError(f"{file} cannot be read as the configuration of a run: {reason}") from fault


def _without_fused(data: dict[str, Any]) -> dict[str, Any]:
    """Drop `adapter.fused` and `compile.fused` of earlier versions: results do not depend on them."""
    for section in (data.get("adapter"), data.get("compile")):
        if isinstance(section, dict):
            section.pop("fused", None)
    return data


# ---- a command line


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """Compose conf/ and the overrides, or change the run of `from=RUN`; raise one ConfigError with all problems."""
    return _varied_run(overrides) if is_varied(overrides) else _composed(_checked_overrides(overrides))


def _checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides that compose; if some are invalid, also validate the values of the others."""
    valid, problems = partition_overrides(overrides)
    valid = _with_folder_model(valid)
    valid += [f"++{key}={format_value(off)}" for key, off in replaced_alternatives(values_of(valid)).items()]
    if problems:
        raise ConfigError([*problems, *_wrong_values(valid)])
    return valid


def _wrong_values(overrides: Sequence[str]) -> list[str]:
    """Return the problems of these overrides only: others may follow from the rejected ones."""
    prefixes = tuple(f"{key_of(text)}=" for text in overrides)
    if not prefixes:
        return []
    try:
        parse_section(RunConfig, _plain(_compose(overrides)))
    except ConfigError as wrong:
        return [problem for problem in wrong.problems if problem.startswith(prefixes)]
    return []


def _with_folder_model(overrides: list[str]) -> list[str]:
    """Select `model=folder` for a bare `model.path=...`, so that sizes and rates of the default model do not apply."""
    values = {key_of(text): text.partition("=")[2] for text in overrides}
    path = values.get("model.path", PREFIX)
    if path.strip("'\"").startswith(PREFIX) or values.keys() & {"model", "experiment"}:
        return overrides
    return ["model=folder", *overrides]


def _composed(overrides: Sequence[str]) -> RunConfig:
    config = _compose(_with_implied_settings(overrides))
    # validated as plain data: Hydra accepts `+key=...` despite a schema
    return _with_matching_eval_rows(_validated(_plain(config), values_of(overrides)))


def _with_implied_settings(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the settings implied by `adapter.start`."""
    settings = implied_settings(values_of(overrides))
    return [*overrides, *(f"++{key}={format_value(value).replace(' ', '')}" for key, value in settings.items())]


# ---- changes to the run of a run.yaml


def is_varied(overrides: Sequence[str]) -> bool:
    """Return whether the run starts from the settings of another run."""
    return any(key_of(text) == "varied_from" for text in overrides)


def _varied_run(overrides: Sequence[str]) -> RunConfig:
    """Return the run of `from=RUN` with the other overrides, in a new folder and from step 0."""
    changes = values_of(check_overrides(overrides))
    source = format_value(changes["varied_from"])
    file = Path(source).expanduser() / "run.yaml"
    if not file.is_file():
        raise CheckpointError(f"from={source}: no run.yaml found. Give the output_dir of a run.")
    refuse(
        f"{key}={changes[key]}: dependent rates and sizes would keep the values of from={source}. Set the keys to "
        f"change, or repeat that run's command (in its manifest.json) with {key}={changes[key]}."
        for key in ("model", "recipe", "experiment", "debug")
        if key in changes
    )
    run = read_run(file)
    over = {
        "output_dir": default_values()["output_dir"],
        **dict.fromkeys(("resume", "training.stop_after", "tracker.name")),
        "dry_run": False,
        **replaced_alternatives(changes),
        **implied_settings(changes),
        **({RATE: run.optimizer.lr} if "optimizer" in changes else {}),
        **({_PROCESSES: run.launch.num_processes} if _resumes(source, changes) else {}),
    }
    return _with_matching_eval_rows(_validated(apply_changes(run, changes, over), changes))


def _resumes(source: str, changes: Mapping[str, Any]) -> bool:
    """Return whether `from=RUN` resumes the run in its own folder."""
    place = Path(str(changes.get("output_dir", ""))).expanduser()
    return changes.get("resume") is not None and place.resolve() == Path(source).expanduser().resolve()


def apply_changes(run: RunConfig, changes: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain data of a run with `over` and then `changes` applied; a selected group replaces its section.

    The run is untrusted: its settings that select code, start processes or send files are reset. Its thread count may
    change the last bits of results and is kept.
    """
    choices = {key: value for key, value in changes.items() if key in conf_files.choices_by_group()}
    sections = {group: load_choice(group, choice) for group, choice in choices.items()}
    config = OmegaConf.create({**literal(asdict(run)), **sections})
    defaults = {**_OFF, **dict(flat("", read_yaml(conf_files.CONF / "config.yaml")))}
    reset = (RUNS_CODE, SENDS_FILES)
    trusted_values = {key: defaults[key] for key in leaf_keys(RunConfig) if typed_only(RunConfig, key) in reset}
    processes = run.launch.num_processes
    if processes != defaults[_PROCESSES] and _PROCESSES not in {**over, **changes}:
        raise ConfigError(
            f"{_PROCESSES}={processes} in run.yaml is not accepted from a file. "
            f"Type {_PROCESSES}={processes}, or another number."
        )
    for key, value in {**trusted_values, **over, **changes}.items():
        if key not in choices:
            OmegaConf.update(config, key, value, merge=True)
    return _plain(config)


# ---- conf/, composed by Hydra


def load_choice(group: str, choice: str) -> dict[str, Any]:
    """Return the section of a group's choice with unresolved `${...}`."""
    return _as_dict(_compose([f"{group}={choice}"])[group], resolve=False)


def named_model(name: str) -> ModelConfig:
    """Return the model of a bare `model=`: a preset of conf/model as in finetune train, else a folder or hub ID."""
    if name not in conf_files.choices_by_group()["model"]:
        return ModelConfig(path=name, weights="pretrained")
    section = load_choice("model", name)
    path = section.get("path", MISSING)
    if path == MISSING:
        raise ConfigError(f"model={name} has no path. Set model=DIR or a hub ID.")
    if Path(name).is_dir():
        raise ConfigError(f"model={name} is both a preset and a folder. Set model=./{name} or model={path}.")
    return ModelConfig(path=path, revision=section["revision"], weights="pretrained")


def default_choices() -> dict[str, str | None]:
    """Return the default choice of each group."""
    return dict(_compose([], return_hydra_config=True).hydra.runtime.choices)


def default_values() -> dict[str, Any]:
    """Return the plain data of a run without overrides, with unresolved `${...}`."""
    return _as_dict(_compose([]), resolve=False)


def values_with(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run from the valid overrides, as plain data; rules on combinations are not checked."""
    return _plain(_compose(_with_folder_model(partition_overrides(overrides)[0])))


def _compose(overrides: Sequence[str], **options: bool) -> DictConfig:
    """Compose conf/ without a schema, because Hydra stops at the first invalid key."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_files.CONF), version_base=_VERSION_BASE):
            return compose("config", overrides=list(overrides), **options)
    except (HydraException, OmegaConfBaseException, YAMLError) as fault:
        raise ConfigError(_one_line(fault)) from fault
    except ValueError as fault:  # of omegaconf: a key inside a list
        deepest = max(map(key_of, overrides), key=lambda key: key.count("."))
        raise ConfigError(f"{deepest} is inside a list or a number ({fault}). Set the whole list.") from fault


def _plain(config: DictConfig) -> dict[str, Any]:
    """Return the plain data of a run with all `${...}` resolved."""
    try:
        _fit_pairs(config)
        return _as_dict(config, resolve=True)
    except OmegaConfBaseException as fault:
        # a misspelled key is often the reason of a failed lookup
        reason = _one_line(fault).partition(" full_key:")[0].rpartition("while resolving interpolation: ")[2].strip('"')
        lookup = f"{fault.full_key}: {reason}." if fault.full_key else f"{reason}."
        raise ConfigError(_problems_besides_lookups(config) or lookup) from fault


def _fit_pairs(config: DictConfig) -> None:
    """Lower the default of `dataset.max_length` so that both answers of a pair fit in a bin."""
    keys = ("task.kind", "batching.packing", "batching.tokens", "dataset.max_length")
    kind, packing, tokens, length = (OmegaConf.select(config, key) for key in keys)
    if not (kind in TASKS and packing and isinstance(tokens, int) and isinstance(length, int)):
        return
    if TASKS[kind].documents > 1 and OmegaConf.is_interpolation(config.dataset, "max_length"):
        config.dataset.max_length = min(length, tokens // TASKS[kind].documents)


def _problems_besides_lookups(config: DictConfig) -> list[str]:
    try:
        parse_section(RunConfig, _as_dict(config, resolve=False))
    except ConfigError as wrong:
        return [problem for problem in wrong.problems if "=${" not in problem]
    return []


def _as_dict(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    data: dict[str, Any] = OmegaConf.to_container(config, resolve=resolve)  # type: ignore[assignment]
    return data


def _one_line(fault: Exception) -> str:
    cause = f" ({fault.__cause__})" if fault.__cause__ else ""
    return " ".join(f"{fault}{cause}".split())
