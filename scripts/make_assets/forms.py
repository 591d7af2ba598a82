"""Phrasings of each skill, read from forms.yaml."""

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Forms:
    """Phrasings of a skill; the lists are explained at the top of forms.yaml."""

    says: list[str]
    asks: list[str]
    eval: list[str]
    follow: str


def load_forms() -> dict[str, Forms]:
    """Return the forms by skill name."""
    table = yaml.safe_load(Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"))
    return {name: Forms(**lists) for name, lists in table.items()}
