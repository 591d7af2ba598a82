"""The ways to put each skill into words, read from forms.yaml beside this file."""

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Forms:
    """What the four lists are for stands at the top of forms.yaml."""

    says: list[str]
    asks: list[str]
    eval: list[str]
    follow: str


def load_forms() -> dict[str, Forms]:
    """Skill name -> its forms."""
    table = yaml.safe_load(Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"))
    return {name: Forms(**lists) for name, lists in table.items()}
