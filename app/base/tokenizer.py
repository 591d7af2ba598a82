"""The tokenizer and chat template of a run."""

import hashlib
import logging
import math
import re
from pathlib import Path
from typing import Any

from app.assets import template_names, template_text
from app.base.source import REMOTE_CODE, fetch_folder, library_errors
from app.chat_rendering import ConversationRefused, render_chat
from app.config.schema import ModelConfig
from app.config.tasks import TASKS
from app.config.validate import did_you_mean, nearest
from app.errors import ConfigError, EnvironmentProblem, refuse
from app.files import read_object

MAX_GROWTH = 10_000  # by all steps of a normalizer; published ones insert single characters
NEW_TOKENS = "new_tokens_of_run"  # attribute of a tokenizer with added tokens


def load_tokenizer(config: ModelConfig, *, needs_template: bool, shipped: str = TASKS["causal"].tokenizer) -> Any:
    """Return a fast tokenizer with the run's chat template. Random weights without a tokenizer use `shipped`."""
    path = config.tokenizer or (shipped if config.weights == "random" else config.path)
    folder = fetch_folder(config, path, with_weights=False)
    template = chosen_template(config)
    key = "model.path" if path == config.path else "model.tokenizer"
    problem = f"{key}={path}: no tokenizer can be read from {folder}"
    for name in ("tokenization_utils_base", "configuration_utils"):  # our messages replace theirs
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    with library_errors(problem, f"Set model.tokenizer=DIR with a tokenizer.json. {REMOTE_CODE}"):
        tokenizer = read_tokenizer(folder, config.trust_remote_code)
    if not tokenizer.is_fast:
        raise EnvironmentProblem(
            f"model.tokenizer={path}: this tokenizer has no fast version (tokenizer.json), which the loss "
            "mask needs. Convert it, or set model.tokenizer=DIR."
        )
    _add_tokens(config, path, tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template. Set model.chat_template=FILE or one of "
            f"{', '.join(template_names())}."
        )
    if needs_template:
        _try_template(config, tokenizer)
        tokenizer.chat_template = _with_options(config, tokenizer.chat_template)
    return tokenizer


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a folder, called once; raise ValueError if it would make texts too long."""
    from transformers import AutoTokenizer

    rules = read_object(folder / "tokenizer.json")
    growth = max(_growth(rules.get("normalizer")), _growth(rules.get("decoder")))
    if growth > MAX_GROWTH:
        raise ValueError(f"tokenizer.json makes texts up to {growth:,.0f} times longer, the limit is {MAX_GROWTH:,}")
    # with trust_remote_code=None transformers would ask at a terminal
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    tokenizer("a")  # raises on values of tokenizer_config.json that loading does not check
    return tokenizer


def _growth(rules: Any) -> float:
    """Return by what factor all steps of a normalizer or decoder can lengthen a text."""
    if isinstance(rules, list):
        return math.prod(map(_growth, rules))
    if not isinstance(rules, dict):
        return 1.0
    written = len(rules.get("content") or rules.get("prepend") or "")
    pattern = rules.get("pattern") or {}
    # a regular expression may match between two characters, and then replaces nothing
    growth = written / (len(pattern["String"]) or 1) if "String" in pattern else written + ("Regex" in pattern)
    return max(1.0, growth) * math.prod(map(_growth, rules.values()))


def _add_tokens(config: ModelConfig, path: str, tokenizer: Any) -> None:
    """Add the texts of `model.add_tokens` as tokens, with ids after the last."""
    vocabulary = tokenizer.get_vocab()
    refuse(
        f"model.add_tokens: {text!r} is already a token of the tokenizer of {path}. Leave it out."
        for text in config.add_tokens
        if text in vocabulary
    )
    tokenizer.add_tokens(list(config.add_tokens))
    setattr(tokenizer, NEW_TOKENS, list(config.add_tokens))


def new_ids(config: ModelConfig, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens in `model.add_tokens`."""
    return [int(tokenizer.convert_tokens_to_ids(text)) for text in config.add_tokens]


def _try_template(config: ModelConfig, tokenizer: Any) -> None:
    """Render a question and its answer: report broken or non-terminating templates before reading rows."""
    try:
        render_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ConversationRefused:  # the rows may be accepted
        return
    except ConfigError as fault:
        source = f"model.chat_template={config.chat_template}:" if config.chat_template else "the tokenizer's template:"
        raise ConfigError(str(fault).replace("model.chat_template:", source)) from fault


def _with_options(config: ModelConfig, template: str | dict[str, str]) -> str | dict[str, str]:
    """Prepend `model.template_options`, as defaults of options that the caller does not pass.

    So samples, evaluation, generation and programs that load final/ render as in training.
    """
    if isinstance(template, dict):
        return {name: str(_with_options(config, text)) for name, text in template.items()}
    words = sorted(set(re.findall(r"\w+", template)))
    refuse(
        f"model.template_options.{name}: the chat template does not use {name}."
        f"{did_you_mean(name, words, listing=False)}"
        for name in config.template_options
        if name not in words
    )
    defaults = [f"{{%- set {name} = {name} | default({value!r}) %}}" for name, value in config.template_options.items()]
    return "".join([*defaults, template])


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the hash of the tokenizer and its chat template."""
    content = f"{tokenizer.backend_tokenizer.to_str()}\n{tokenizer.chat_template}"
    return hashlib.sha256(content.encode()).hexdigest()


def chosen_template(config: ModelConfig) -> str | None:
    """Return the text of `model.chat_template`; None for the tokenizer's own."""
    template = config.chat_template
    if template is None:
        return None
    if template in template_names():
        return template_text(template)
    if Path(template).is_file():
        return Path(template).read_text()
    near = nearest(template, template_names())
    raise ConfigError(
        f"model.chat_template={template} is neither a file nor one of {', '.join(template_names())}."
        f"{f' Did you mean {near}?' if near else ''}"
    )


def check(config: ModelConfig) -> list[str]:
    """Return the problems with `model.chat_template`, before anything is loaded."""
    try:
        chosen_template(config)
    except ConfigError as problem:
        return list(problem.problems)
    return []
