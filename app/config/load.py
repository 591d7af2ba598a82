"""Command line and conf/ into a checked RunConfig."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from app.config.groups import CONF
from app.config.overrides import check_overrides
from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.config.strict import typed
from app.errors import CheckpointError, ConfigError

VERSION_BASE = "1.3"


def load_run(config: DictConfig) -> RunConfig:
    """The typed run. The plain container is merged into the schema anew: Hydra lets `+key=...` past its own check."""
    return checked_run(_plain(config))


def checked_run(data: Mapping[str, Any]) -> RunConfig:
    """Plain data, as it stands in a run.yaml, as a typed run that broke no rule."""
    run = typed(RunConfig, data)
    problems = problems_of(run)
    if problems:
        raise ConfigError(problems)
    return run


def read_run(file: Path) -> RunConfig:
    """The run that a run.yaml describes; rules about its start (resume, folders) have had their time."""
    try:
        return typed(RunConfig, _plain(OmegaConf.load(file)))  # type: ignore[arg-type]
    except (OSError, YAMLError, OmegaConfBaseException) as fault:
        raise CheckpointError(
            f"{file} cannot be read as the configuration of a run ({_one_line(fault)})."
        ) from fault


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """What `hydra.main` would hand over for these overrides, with every problem in one ConfigError.

    Composes without the typed schema, because Hydra stops at the first key that a schema refuses.
    """
    checked = check_overrides(overrides, RunConfig)
    _store_schema({})
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            config = compose("config", overrides=checked)
    except (HydraException, OmegaConfBaseException) as fault:
        raise ConfigError(_one_line(fault)) from fault
    return load_run(config)


def store_schema() -> None:
    """Make the typed schema the first defaults entry of conf/config.yaml."""
    _store_schema(RunConfig)


def _store_schema(node: Any) -> None:
    ConfigStore.instance().store(name="schema", node=node)


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        data: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as fault:
        raise ConfigError(_one_line(fault)) from fault
    data.pop("hydra", None)
    return data


def _one_line(fault: Exception) -> str:
    cause = f" ({fault.__cause__})" if fault.__cause__ else ""
    return " ".join(f"{fault}{cause}".split())
