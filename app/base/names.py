"""Names of the same weight in the model, in PEFT, in the optimizer and in files.

- In the trained model: `model.layers.0.mlp.up_proj.weight`.
- In PEFT's network: `base_model.model.` and that name.
- In the optimizer: `network.` and the name in PEFT's network.
- In the folder's own model, which may be a composite of text and images whose text part is trained:
  `model.language_model.layers.0.mlp.up_proj.weight`.
- In adapter files, which other programs load on the composite: `base_model.model.` and the name in the folder's model.
- In weight files: transformers' conversion rules change the name in the folder's model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from app.config.adapters import PEFT_PREFIX

_IN_OPTIMIZER = "network."  # the attribute of TrainingModel


def in_peft(name: str) -> str:
    """Return the name in PEFT's network, or in the files of an adapter."""
    return PEFT_PREFIX + name


def without_peft(name: str) -> str:
    """Return the name in the model inside PEFT's network; unchanged without one."""
    return name.removeprefix(PEFT_PREFIX)


def without_optimizer(name: str) -> str:
    """Return the name in PEFT's network for a name in the optimizer."""
    return name.removeprefix(_IN_OPTIMIZER)


def without_backbone(name: str, base_model_prefix: str) -> str:
    """Return the name in files that contain only the backbone."""
    return name.removeprefix(f"{base_model_prefix}.")


@dataclass(frozen=True)
class Names:
    """Names in the trained model, in the folder's own model and in its weight files."""

    places: tuple[tuple[str, str], ...] = ()  # modules in the trained and the folder's model; empty if names are equal
    files: Mapping[str, str] = field(default_factory=dict)  # names in the weight files, by name in the trained model

    @property
    def is_part(self) -> bool:
        """Whether the trained model is the text part of a composite."""
        return bool(self.places)

    def of_folder(self, name: str) -> str:
        """Return the name in the folder's model, or the same name if it has none."""
        return _replaced(name, self.places) or name if self.places else name

    def of_trained(self, name: str) -> str | None:
        """Return the name in the trained model for one in the folder's model; None for other towers."""
        return _replaced(name, tuple((there, here) for here, there in self.places)) if self.places else name

    def of_adapter(self, name: str) -> str:
        """Return the name in adapter files for one in PEFT's network; tensors without a layer keep theirs."""
        plain = without_peft(name)
        return name if plain == name else in_peft(self.of_folder(plain))

    def of_file(self, file: str) -> str | None:
        """Return the name in the trained model for one in the weight files."""
        return self._by_file.get(file)

    @cached_property
    def _by_file(self) -> dict[str, str]:
        return {file: name for name, file in self.files.items()}

    def with_files(self, stored: Mapping[str, str], converted: Iterable[str]) -> "Names":
        """Add names in weight files: `stored`, by name in the folder's model, and those of `converted` weights."""
        by_folder = {**stored, **{name: name for name in converted}}
        return replace(self, files={own: file for name, file in by_folder.items() if (own := self.of_trained(name))})


def _replaced(name: str, places: Iterable[tuple[str, str]]) -> str | None:
    for old, new in places:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
