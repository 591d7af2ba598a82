"""The tokenizer of a run, and the chat templates that a run can name."""

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

MAX_GROWTH = 10_000  # by the steps of a normalizer together; published ones write single characters
NEW_TOKENS = "new_tokens_of_run"  # attribute of a tokenizer that has more than its files


def load_tokenizer(config: ModelConfig, *, needs_template: bool, shipped: str = TASKS["causal"].tokenizer) -> Any:
    """A fast tokenizer with the run's chat template. Random weights without a tokenizer use the `shipped` one."""
    path = config.tokenizer or (shipped if config.weights == "random" else config.path)
    folder = fetch_folder(config, path, with_weights=False)
    template = chosen_template(config)
    key = "model.path" if path == config.path else "model.tokenizer"
    problem = f"{key}={path}: no tokenizer can be read from {folder}"
    for name in ("tokenization_utils_base", "configuration_utils"):  # our messages say it
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
    """Return the tokenizer of a folder, called once; ValueError for one that would make texts too long."""
    from transformers import AutoTokenizer

    rules = read_object(folder / "tokenizer.json")
    growth = max(_growth(rules.get("normalizer")), _growth(rules.get("decoder")))
    if growth > MAX_GROWTH:
        raise ValueError(f"tokenizer.json makes texts up to {growth:,.0f} times longer, the limit is {MAX_GROWTH:,}")
    # with trust_remote_code=None transformers would ask at a terminal
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    tokenizer("a")  # raises over values of tokenizer_config.json that loading does not look at
    return tokenizer


def _growth(rules: Any) -> float:
    """Return how many times longer the steps of a normalizer or decoder can make a text together."""
    if isinstance(rules, list):
        return math.prod(map(_growth, rules))
    if not isinstance(rules, dict):
        return 1.0
    written = len(rules.get("content") or rules.get("prepend") or "")
    pattern = rules.get("pattern") or {}
    # a regular expression may match between two characters, and then replaces nothing
    own = written / (len(pattern["String"]) or 1) if "String" in pattern else written + ("Regex" in pattern)
    return max(1.0, own) * math.prod(map(_growth, rules.values()))


def _add_tokens(config: ModelConfig, path: str, tokenizer: Any) -> None:
    """Make each text of `model.add_tokens` one token, of the ids after the last."""
    known = tokenizer.get_vocab()
    refuse(
        f"model.add_tokens: {text!r} is already a token of the tokenizer of {path}. Leave it out."
        for text in config.add_tokens
        if text in known
    )
    tokenizer.add_tokens(list(config.add_tokens))
    setattr(tokenizer, NEW_TOKENS, list(config.add_tokens))


def new_ids(config: ModelConfig, tokenizer: Any) -> list[int]:
    """The ids of the tokens of `model.add_tokens`."""
    return [int(tokenizer.convert_tokens_to_ids(text)) for text in config.add_tokens]


def _try_template(config: ModelConfig, tokenizer: Any) -> None:
    """Render a question and its answer: a template that is no program, or never ends, is told before any row."""
    try:
        render_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ConversationRefused:  # the rows may be others
        return
    except ConfigError as fault:
        named = f"model.chat_template={config.chat_template}:" if config.chat_template else "the tokenizer's template:"
        raise ConfigError(str(fault).replace("model.chat_template:", named)) from fault


def _with_options(config: ModelConfig, template: str | dict[str, str]) -> str | dict[str, str]:
    """Put `model.template_options` in front, as values of what the caller does not give.

    So samples, evaluation, generation, and whoever loads final/ render as training did.
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
    """Hash of everything that turns text into ids."""
    content = f"{tokenizer.backend_tokenizer.to_str()}\n{tokenizer.chat_template}"
    return hashlib.sha256(content.encode()).hexdigest()


def chosen_template(config: ModelConfig) -> str | None:
    """The text of `model.chat_template`; None leaves the tokenizer's own."""
    given = config.chat_template
    if given is None:
        return None
    if given in template_names():
        return template_text(given)
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
