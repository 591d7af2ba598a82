"""Chat templates that a run can name, for tokenizers that have none or a wrong one."""

from pathlib import Path

from app.assets import ROOT
from app.config.did_you_mean import nearest
from app.config.schema import ModelConfig
from app.errors import ConfigError

_FOLDER = ROOT / "templates"


def template_names() -> tuple[str, ...]:
    """Those that ship, for `model.chat_template=NAME`."""
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
    """The problem with `model.chat_template`, told before anything is loaded."""
    try:
        chosen_template(config)
    except ConfigError as problem:
        return list(problem.problems)
    return []
