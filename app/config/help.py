"""What `--help` shows: the commands, and every group with its choices, read from conf/ itself."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from app.config.groups import CONF, choices_by_group

_WIDTH = 110
_TOLD = ("recipe", "model", "dataset", "task", "sweep")  # groups whose choices are told one by one
_FRAME = """\
Fine-tune a language model.

  python -m app.train                                          the model and data that ship
  python -m app.train recipe=qlora model=llama dataset=messages dataset.path=chat.jsonl
  python -m app.train model.path=DIR dataset=text dataset.path=books/ optimizer.lr=1e-4
  python -m app.train output_dir=runs/mine resume=auto         go on after a stop
  python -m app.train -m recipe=lora,full optimizer.lr=1e-3,3e-4     a sweep
  python -m app.train model=llama dry_run=true                 the plan, without weights
  python -m app.train recipe=qlora --cfg job                   every key and its value

group=choice takes one of these (* unless you choose), key=value sets one key of the result:

{groups}

Before: python -m app.check data, with the same words, looks through the data.
Then: python -m app.generate, app.evaluate, app.report, app.reproduce run=DIR.
Keys are explained in docs/config.md, data in docs/data.md.
"""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Hydra's own help shows files that nobody can choose."""
    return any(argument in {"-h", "--help"} for argument in arguments)


def help_text() -> str:
    """For app.train."""
    defaults = _defaults()
    listed = [
        _told(group, names, defaults) if group in _TOLD else _named(group, names, defaults)
        for group, names in choices_by_group().items()
        if names
    ]
    return _FRAME.format(groups="\n".join(listed))


def _named(group: str, names: Sequence[str], defaults: dict[str, str | None]) -> str:
    words = " ".join(f"{name}{_star(group, name, defaults)}" for name in names)
    return textwrap.fill(words, _WIDTH, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16)


def _told(group: str, names: Sequence[str], defaults: dict[str, str | None]) -> str:
    lines = [
        f"    {name + _star(group, name, defaults):<20}{_purpose(CONF / group / f'{name}.yaml')}"
        for name in names
    ]
    return "\n".join([f"  {group}", *lines])


def _star(group: str, name: str, defaults: dict[str, str | None]) -> str:
    return "*" if defaults.get(group) == name else ""


def _purpose(file: Path) -> str:
    """The first line of its first comment, without the command that shows its use."""
    comment = next(
        line
        for line in file.read_text("utf-8").splitlines()
        if line.startswith("# ") and "@package" not in line
    )
    return textwrap.shorten(
        comment[2:].partition("python -m")[0].rstrip(" :."), _WIDTH - 22, placeholder=" ..."
    )


def _defaults() -> dict[str, str | None]:
    listed = yaml.safe_load((CONF / "config.yaml").read_text("utf-8"))["defaults"]
    chosen = [each for each in listed if isinstance(each, dict)]
    return {str(group): choice for each in chosen for group, choice in each.items()} | _of_recipe(chosen)


def _of_recipe(chosen: Sequence[dict[str, str]]) -> dict[str, str | None]:
    """What the default recipe decides beyond config.yaml."""
    recipe = next(each["recipe"] for each in chosen if "recipe" in each)
    told = yaml.safe_load((CONF / "recipe" / f"{recipe}.yaml").read_text("utf-8"))
    overridden = [each for each in told.get("defaults", []) if isinstance(each, dict)]
    return {key.removeprefix("override /"): choice for each in overridden for key, choice in each.items()}
