"""The tokenizer of a run, with its chat template settled."""

import logging
from pathlib import Path
from typing import Any

from app.assets import ROOT
from app.config.schema import ModelConfig
from app.config.suggest import did_you_mean
from app.errors import ConfigError, EnvironmentProblem
from app.model.source import fetch_folder

_TEMPLATES = ROOT / "templates"
_SHIPPED = "asset:tiny"


def template_names() -> tuple[str, ...]:
    """The chat templates that ship, for `model.chat_template=NAME`."""
    return tuple(sorted(file.stem for file in _TEMPLATES.glob("*.jinja")))


def load_tokenizer(config: ModelConfig, *, needs_template: bool) -> Any:
    """A fast tokenizer. Random weights without a tokenizer of their own use the one that ships."""
    from transformers import AutoTokenizer  # noqa: PLC0415  seconds of import, after the cheap checks

    path = config.tokenizer or (_SHIPPED if config.weights == "random" else config.path)
    folder = fetch_folder(config, path, with_weights=False)
    template = _chosen_template(config)
    try:
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise EnvironmentProblem(
            f"model.tokenizer={path}: no tokenizer can be read from {folder} ({_first_line(fault)}). "
            "Give model.tokenizer=DIR with a tokenizer.json."
        ) from fault
    if not tokenizer.is_fast:
        raise EnvironmentProblem(
            f"model.tokenizer={path}: this tokenizer has no fast form (tokenizer.json), so labels cannot be placed. "
            "Convert it, or give model.tokenizer=DIR."
        )
    if template is not None:
        tokenizer.chat_template = template
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template. Give model.chat_template=FILE or one of "
            f"{', '.join(template_names())}."
        )
    return tokenizer


def check_template(config: ModelConfig) -> list[str]:
    """The problem with `model.chat_template`, told before anything is loaded."""
    try:
        _chosen_template(config)
    except ConfigError as problem:
        return list(problem.problems)
    return []


def _chosen_template(config: ModelConfig) -> str | None:
    given = config.chat_template
    if given is None:
        return None
    if given in template_names():
        return (_TEMPLATES / f"{given}.jinja").read_text().rstrip("\n")
    if Path(given).is_file():
        return Path(given).read_text()
    raise ConfigError(
        f"model.chat_template={given} is neither a file nor one of {', '.join(template_names())}."
        f"{did_you_mean(given, template_names())}"
    )


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0][:200]
