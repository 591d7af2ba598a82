"""Kinds of model that transformers knows, each with the best way to train it that was proven with a tiny model.

`assets/model_kinds.json` is made by `python -m scripts.make_kinds`.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from app.assets import ROOT

# from the best to none: documents in one row; a row each; a row each, through the model's own attention
TIERS = PACKED, PADDED, OWN, REFUSED = "packed", "padded", "own", "refused"


@dataclass(frozen=True, slots=True)
class Tier:
    """How models of a kind are trained, and why not in a better way."""

    name: str
    reason: str = ""
    layers: tuple[str, ...] = ()  # types of layers of the tiny model, beside those that any kind may have
    compared: bool = True  # whether numbers were compared; else a reason alone, which each model is asked for anew
    text_of: str | None = None  # of a kind that reads more than text: that of its text part, which is trained
    uncalled: tuple[str, ...] = ()  # modules whose linear layers training does not call, with * for numbers

    @property
    def accepted(self) -> bool:
        return self.name != REFUSED


@dataclass(frozen=True, slots=True)
class ModelKinds:
    """The table by task, then by model_type."""

    transformers: str  # the version that its models were built with
    tasks: dict[str, dict[str, Tier]]

    def facts(self, task: str) -> dict[str, Any]:
        """As they stand in check.json: `total` and `accepted` are of one task."""
        counted = {name: _counts(tiers.values()) for name, tiers in self.tasks.items()}
        return {
            "transformers": self.transformers,
            "total": counted[task]["total"],
            "accepted": counted[task]["accepted"],
            "kinds": [
                {"kind": kind, "task": name, "tier": tier.name, "reason": tier.reason, "text_of": tier.text_of}
                for name, tiers in self.tasks.items()
                for kind, tier in tiers.items()
            ],
            "by_task": counted,
        }


def _counts(tiers: Collection[Tier]) -> dict[str, int]:
    by_name = {name: sum(tier.name == name for tier in tiers) for name in TIERS}
    return {"total": len(tiers), "accepted": sum(tier.accepted for tier in tiers), **by_name}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def without_numbers(name: str) -> str:
    """Return the name of a module with * for the numbers of repeated layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def uncalled_modules(kind: str) -> tuple[str, ...]:
    """Return the modules whose linear layers models of a kind do not call in training, with * for numbers."""
    return tuple(name for kinds in model_kinds().tasks.values() if kind in kinds for name in kinds[kind].uncalled)


@cache
def model_kinds() -> ModelKinds:
    """The table that ships."""
    content = json.loads((ROOT / "model_kinds.json").read_text("utf-8"))
    tasks = {
        task: {kind: Tier(**{key: _frozen(value) for key, value in entry.items()}) for kind, entry in kinds.items()}
        for task, kinds in content["tasks"].items()
    }
    return ModelKinds(content["transformers"], tasks)
