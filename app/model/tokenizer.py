"""The tokenizer of a run, and the chat templates that a run can name."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from app.assets import ROOT
from app.config.did_you_mean import nearest
from app.config.schema import ModelConfig
from app.errors import ConfigError, EnvironmentProblem
from app.model.source import fetch_folder, gist

_SHIPPED = "asset:tiny"


def load_tokenizer(config: ModelConfig, *, needs_template: bool) -> Any:
    """A fast tokenizer with the run's chat template. Random weights without a tokenizer use the shipped one."""
    from transformers import AutoTokenizer

    path = config.tokenizer or (_SHIPPED if config.weights == "random" else config.path)
    folder = fetch_folder(config, path, with_weights=False)
    template = chosen_template(config)
    try:
        for name in ("tokenization_utils_base", "configuration_utils"):  # our messages say it
            logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        key = "model.path" if path == config.path else "model.tokenizer"
        raise EnvironmentProblem(
            f"{key}={path}: no tokenizer can be read from {folder} ({gist(fault)}). "
            "Give model.tokenizer=DIR with a tokenizer.json."
        ) from fault
    if not tokenizer.is_fast:
        raise EnvironmentProblem(
            f"model.tokenizer={path}: this tokenizer has no fast form (tokenizer.json), so labels cannot be "
            "placed. Convert it, or give model.tokenizer=DIR."
        )
    if template is not None:
        tokenizer.chat_template = template
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template. Give model.chat_template=FILE or one of "
            f"{', '.join(template_names())}."
        )
    return tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything that turns text into ids."""
    content = f"{tokenizer.backend_tokenizer.to_str()}\n{tokenizer.chat_template}"
    return hashlib.sha256(content.encode()).hexdigest()


_FOLDER = ROOT / "templates"


def template_names() -> tuple[str, ...]:
    """Names of the shipped templates, for `model.chat_template=NAME`."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.jinja")))


def chosen_template(config: ModelConfig) -> str | None:
    """The text of `model.chat_template`; None leaves the tokenizer's own."""
    given = config.chat_template
    if given is None:
        return None
    if given in template_names():
        return (_FOLDER / f"{given}.jinja").read_text().rstrip("\n")
    if Path(given).is_file():
        return Path(given).read_text()
    near = nearest(given, template_names())
    raise ConfigError(
        f"model.chat_template={given} is neither a file nor one of {', '.join(template_names())}."
        f"{f' Did you mean {near}?' if near else ''}"
    )


def check(config: ModelConfig) -> list[str]:
    """Problems with `model.chat_template`, found before anything is loaded."""
    try:
        chosen_template(config)
    except ConfigError as problem:
        return list(problem.problems)
    return []
