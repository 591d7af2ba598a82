"""Names of one weight in each place that has it.

| place | for example |
|---|---|
| the trained model | model.layers.0.mlp.up_proj.weight |
| PEFT's network around it | base_model.model.model.layers.0.mlp.up_proj.base_layer.weight |
| the optimizer | network. and the name in PEFT's network |
| the folder's own model: a composite (text and images, say), of which the trained model may be the text part | model.language_model.layers.0.mlp.up_proj.weight |
| the files of an adapter, which other programs load on the composite | base_model.model. and a name in the folder's model |
| the weight files, whose names transformers' conversion rules change | language_model.model.layers.0.mlp.up_proj.weight |
"""  # noqa: E501  (a table)

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
    """Return the name of a trained weight by that in the optimizer."""
    return name.removeprefix(_IN_OPTIMIZER)


def without_backbone(name: str, base_model_prefix: str) -> str:
    """Return the name in files that were saved from the backbone alone."""
    return name.removeprefix(f"{base_model_prefix}.")


@dataclass(frozen=True)
class Names:
    """Names in the trained model, in the folder's own model and in its weight files."""

    places: tuple[tuple[str, str], ...] = ()  # modules in the trained and in the folder's model; empty: they are equal
    files: Mapping[str, str] = field(default_factory=dict)  # in the weight files, by those in the trained model

    @property
    def is_part(self) -> bool:
        """Whether the trained model is the text part of a composite."""
        return bool(self.places)

    def of_folder(self, name: str) -> str:
        """Return the name in the folder's model; unchanged where it has none."""
        return _replaced(name, self.places) or name if self.places else name

    def of_trained(self, name: str) -> str | None:
        """Return the name in the trained model by that in the folder's; None for other towers of a composite."""
        return _replaced(name, tuple((there, here) for here, there in self.places)) if self.places else name

    def of_adapter(self, name: str) -> str:
        """Return the name in the files of an adapter by that in PEFT's network; what is of no layer keeps its own."""
        plain = without_peft(name)
        return name if plain == name else in_peft(self.of_folder(plain))

    def of_file(self, file: str) -> str | None:
        """Return the name in the trained model by that in the weight files."""
        return self._by_file.get(file)

    @cached_property
    def _by_file(self) -> dict[str, str]:
        return {file: name for name, file in self.files.items()}

    def with_files(self, stored: Mapping[str, str], converted: Iterable[str]) -> "Names":
        """Add names in the files: `stored` by those in the folder's model, and what conversion rules write."""
        by_folder = {**stored, **{name: name for name in converted}}
        return replace(self, files={own: file for name, file in by_folder.items() if (own := self.of_trained(name))})


def _replaced(name: str, places: Iterable[tuple[str, str]]) -> str | None:
    for old, new in places:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
