"""Parameters that transformers makes of several tensors of the files, or unpacks, turned back into what it saves."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.base.conversion import FolderReader
from app.base.safetensors_files import StoredTensor


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters of one conversion rule."""

    reads: Mapping[str, Callable[[], Tensor]]  # by their names in the model
    stored: frozenset[str]  # names of the tensors that they are made of
    saved: Mapping[str, Tensor]  # what transformers saves of them, on meta


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Some parameters of a folder, by groups that are read, changed and turned back together."""

    model: Any
    groups: tuple[_Group, ...]
    _ready: dict[str, Tensor] = field(default_factory=dict)  # tensors that were made with others, until they are taken

    @classmethod
    def of(cls, model: Any, reader: FolderReader, wanted: Collection[str], *, unpacked: bool) -> "ConvertedWeights":
        """Those of the parameters `wanted` that are made of others, and all that are unpacked."""
        from transformers.core_model_loading import revert_weight_conversion

        groups, known, shapes = [], reader.tensors(), {n: each.shape for n, each in model.state_dict().items()}
        for targets, pieces in reader.conversions():
            is_packed = unpacked and any(each.dtype.itemsize == 1 for each in pieces.values())
            if is_packed or not set(wanted).isdisjoint(targets):
                on_meta = {name: torch.empty(shapes[name], device="meta") for name in targets}
                saved = revert_weight_conversion(model, on_meta)
                if is_packed or saved.keys() == pieces.keys():
                    reads = {name: known[name].whole for name in targets}
                    groups.append(_Group(reads, frozenset(pieces), saved))
        return cls(model, tuple(groups))

    @property
    def parameters(self) -> set[str]:
        return {name for group in self.groups for name in group.reads}

    @property
    def names(self) -> dict[str, _Group]:
        """The groups by the names of what is saved of them."""
        return {name: group for group in self.groups for name in group.saved}

    def in_place(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
        """The tensors of a folder with what is saved in place of what was stored, where the first of a group was."""
        of_stored = {name: group for group in self.groups for name in group.stored}
        found: dict[str, StoredTensor] = {}
        for name, place in tensors.items():
            if name not in of_stored:
                found[name] = place
                continue
            for saved, like in of_stored[name].saved.items():
                changed = replace(place, file=Path(), name=saved, shape=like.shape, dtype=dtype)
                found.setdefault(saved, changed)
        return found

    def take(self, name: str, changed: Callable[[str, Tensor], Tensor]) -> Tensor:
        """A saved tensor; `changed` is given each parameter of its group, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        if name not in self._ready:
            group = self.names[name]
            values = {each: changed(each, read()) for each, read in group.reads.items()}
            self._ready.update(revert_weight_conversion(self.model, values))
        return self._ready.pop(name)
