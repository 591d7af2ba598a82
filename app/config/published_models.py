"""Chat template, special tokens and code of a model: read from its files on this machine, or known by its hub ID.

Nothing is downloaded and no code runs: a received config must not start either.
"""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from app.assets import template_names, template_text
from app.chat_rendering import render_text
from app.files import read_object

_CONFIG, _TOKENIZER, _TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 1 << 20
_QUESTION = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
# conversations that tell templates apart: with and without a system message, one and several turns
_CONVERSATIONS = (_QUESTION, [{"role": "system", "content": "d"}, *_QUESTION], [*_QUESTION, *_QUESTION])


def why_own_template(model: str, name: str, builtin: str) -> str:
    """Return how a template, which equals a built-in one, is known to be the model's own; empty if it is not."""
    text = _own_template(model)
    if text is None and _file(model, _TOKENIZER) is not None:
        return ""  # the tokenizer has no template
    if text is not None and builtin in template_names():
        return f"equal to the chat template of {model} on this machine" if _are_equal(model, text, builtin) else ""
    return f"the chat template of {model}, by its name" if name in _facts(model).get("templates", ()) else ""


def why_own_token(model: str, kind: str, text: Any) -> str:
    """Return how a special token such as `eos_token` is known to be the model's own; empty if it is not."""
    if _file(model, _TOKENIZER) is not None:
        return f"in the tokenizer of {model} on this machine" if _token(model, kind) == text else ""
    return f"the {kind} of {model}, by its name" if _facts(model).get("tokens", {}).get(kind) == text else ""


def why_no_code(model: str) -> str:
    """Return how it is known that a model needs no code of its repository; empty if it is not."""
    file = _file(model, _CONFIG)
    if file is not None:
        return "" if "auto_map" in read_object(file) else f"config.json of {model} on this machine names no code"
    return f"transformers has the class of {model}, by its name" if _facts(model) else ""


@cache
def _table() -> Sequence[Mapping[str, Any]]:
    table: Sequence[Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_name("published_models.yaml").read_text())
    return table


def _facts(model: str) -> Mapping[str, Any]:
    """Return the table entry of a hub ID; empty for others and for folders, whose names say nothing."""
    owner, _, name = model.lower().partition("/")
    if not owner or not name or "/" in name or os.path.exists(model):  # noqa: PTH110  (does not raise)
        return {}
    return next((facts for facts in _table() if any(fnmatch(name, pattern) for pattern in facts["models"])), {})


def _file(model: str, name: str) -> Path | None:
    """Return a file of a folder, or of a hub ID in the cache of huggingface_hub."""
    folder = os.path.expanduser(model)  # noqa: PTH111  (does not raise for an unknown user)
    if os.path.isdir(folder):  # noqa: PTH112
        file = Path(folder, name)
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _own_template(model: str) -> str | None:
    """Return the text of the model's chat template; None if it has none on this machine."""
    file = _file(model, _TEMPLATE)
    if file is not None:
        return file.read_text("utf-8", "replace") if file.stat().st_size < _MAX_TEMPLATE_BYTES else None
    config = _file(model, _TOKENIZER)
    text = read_object(config).get("chat_template") if config else None
    return text if isinstance(text, str) else None


def _token(model: str, kind: str) -> Any:
    config = _file(model, _TOKENIZER)
    value = read_object(config).get(kind) if config else None
    return value.get("content") if isinstance(value, dict) else value


def _are_equal(model: str, text: str, builtin: str) -> bool:
    """Return whether two templates render the same conversations to the same text."""
    tokens = {kind: _token(model, kind) or "" for kind in ("bos_token", "eos_token")}
    other = template_text(builtin)
    texts = [render_text(text, talk, tokens) for talk in _CONVERSATIONS]
    return texts[0] is not None and texts == [render_text(other, talk, tokens) for talk in _CONVERSATIONS]
