"""A base read file by file, each weight packed as it is read.

transformers packs as it reads too, but keeps every file mapped until the last one is through. Here no more than one
file is open, so that the host needs what is kept and that file.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.model.held import Held
from app.model.quantization import Quantizer, backbone_linear_layers

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_shards(lm: Any, folder: Path, quantizer: Quantizer | None, held: Held) -> bool:
    """Fill `lm`, whose parameters are on meta; false, and nothing is done, where its names are not those of the files.

    transformers renames, splits and joins what some kinds have in their files, and knows which of them stay in float32.
    """
    lm.tie_weights()
    files = _files(folder)
    if not _named_alike(lm, files) or _has_own_dtypes(lm):
        return False
    packed = set() if quantizer is None else set(backbone_linear_layers(lm))
    for file, names in files.items():
        with _opened(file) as tensors:
            for name in sorted(names):
                layer = name.removesuffix(".weight")
                _put(lm, name, tensors.get_tensor(name), held, stays=layer not in packed)
                if quantizer is not None and layer in packed:
                    quantizer.quantize_layer(lm, layer)
    if quantizer is None:
        lm.requires_grad_(True)
    lm.tie_weights()
    lm.to(held.device)  # buffers
    _take_generation_settings(lm, folder)
    left = [name for name, parameter in lm.named_parameters() if parameter.device.type == "meta"]
    assert not left, f"not read: {left[:3]}"
    lm.eval()
    return True


def _take_generation_settings(lm: Any, folder: Path) -> None:
    """As from_pretrained does: they are no part of the model's own numbers."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models that are made inside have no parameters in memory, but the buffers that they compute."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def _files(folder: Path) -> dict[Path, set[str]]:
    """Which tensors are in which file."""
    index = folder / _INDEX
    if not index.is_file():
        with _opened(folder / _ONE) as tensors:
            return {folder / _ONE: set(tensors.keys())}
    places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    inside: dict[Path, set[str]] = {}
    for name, file in places.items():
        inside.setdefault(folder / file, set()).add(name)
    return inside


def _named_alike(lm: Any, files: Mapping[Path, set[str]]) -> bool:
    """Each tensor is a parameter, and of parameters that are one under several names exactly one is there."""
    names: dict[int, set[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    found = [name for inside in files.values() for name in inside]
    once = all(len(same & set(found)) == 1 for same in names.values())
    return once and len(found) == len(names)


def _has_own_dtypes(lm: Any) -> bool:
    return any(getattr(lm, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict"))


def _put(lm: Any, name: str, given: Tensor, held: Held, *, stays: bool) -> None:
    """A copy, if it stays: what a file gives is a piece of it, mapped."""
    place, _, last = name.rpartition(".")
    owner: nn.Module = lm.get_submodule(place)
    expected = getattr(owner, last)
    if given.shape != expected.shape:
        raise ValueError(f"{name} is {tuple(given.shape)}, the model has {tuple(expected.shape)}")
    dtype = held.dtype if given.is_floating_point() else given.dtype
    value = given.to(device=held.device, dtype=dtype, copy=stays)
    owner._parameters[last] = nn.Parameter(value, requires_grad=False)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as tensors:
        yield tensors
