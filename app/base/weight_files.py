"""Weights in safetensors files, and the names of a weight in the model, in PEFT, in the optimizer and in files.

- In the trained model: `model.layers.0.mlp.up_proj.weight`.
- In PEFT's network: `base_model.model.` and that name.
- In the optimizer: `network.` and the name in PEFT's network.
- In the folder's own model, which may be a composite of text and images whose text part is trained:
  `model.language_model.layers.0.mlp.up_proj.weight`.
- In adapter files, which other programs load on the composite: `base_model.model.` and the name in the folder's model.
- In weight files: transformers' conversion rules change the name in the folder's model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from app.base.source import INDEX, WEIGHTS, weight_files
from app.config.adapters import ADAPTER_WEIGHTS, PEFT_PREFIX
from app.config.schema import ModelConfig
from app.errors import CheckpointError, gist

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
        return replace(self, files={ours: file for name, file in by_folder.items() if (ours := self.of_trained(name))})


def _replaced(name: str, places: Iterable[tuple[str, str]]) -> str | None:
    for old, new in places:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


# ---- safetensors files


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,  # scales of fp8 weights
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place and form of a tensor in a weight file."""

    file: Path
    name: str  # in that file
    shape: torch.Size  # or one with more rows: see `with_mean_rows`
    dtype: torch.dtype

    def read(self) -> Tensor:
        with safe_open(str(self.file), "pt") as content:
            tensor: Tensor = content.get_tensor(self.name)
        return with_mean_rows(tensor, self.shape[0]) if self.shape else tensor


def is_resized(config: ModelConfig, stored: torch.Size, shape: torch.Size) -> bool:
    """Return whether a stored tensor lacks only vocabulary rows of `shape`."""
    return config.vocab_size is not None and stored < shape == (config.vocab_size, *stored[1:])


def with_mean_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor with `rows` rows: new ones are the mean of the others, in fp32.

    transformers' `resize_token_embeddings` samples them from a narrow normal distribution around that mean.
    """
    if len(tensor) >= rows:
        return tensor
    total = sum(part.double().sum(0) for part in tensor.split(4096))
    mean = torch.as_tensor(total / len(tensor), dtype=torch.float32)
    return torch.cat([tensor.float(), mean.expand(rows - len(tensor), *tensor.shape[1:])])


Described = TypeVar("Described", Tensor, StoredTensor)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the weight files in a folder, in file order."""
    return {name: tensor for file in weight_files(folder) for name, tensor in tensors_of_file(file).items()}


def tensors_of_file(file: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a weight file."""
    with safe_open(str(file), "pt") as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 (not a mapping)
        return {
            name: StoredTensor(file, name, torch.Size(piece.get_shape()), _DTYPES[piece.get_dtype()])
            for name, piece in slices.items()
        }


def require_float(name: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Refuse integers in place of weights of `dtype`, which a cast would hide."""
    if dtype.is_floating_point and not stored.is_floating_point:
        raise ValueError(f"{name} has integers ({stored}), but the model needs {dtype}")


def require_finite(name: str, numbers: Tensor) -> None:
    """Refuse NaN and infinity: they would show as a wrong loss, or be quantized to finite values."""
    if not (numbers.is_floating_point() and numbers.numel()):
        return
    wide = numbers if numbers.dtype.itemsize > 1 else numbers.to(torch.bfloat16)  # fp8 has no minimum in torch
    if not all(bool(extreme.isfinite()) for extreme in wide.aminmax()):
        raise ValueError(f"{name} has NaN, or numbers too large for {numbers.dtype}")


def adapter_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter; refuse a damaged file, NaN and infinity."""
    file = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
        for name, tensor in tensors.items():
            require_finite(name, tensor)
    except (OSError, ValueError, SafetensorError) as fault:
        raise CheckpointError(f"{file} cannot be loaded ({gist(fault)}). Restore the adapter from a backup.") from fault
    return tensors


def size_of(tensor: Tensor | StoredTensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def widest_first(named: Mapping[str, Described]) -> dict[str, Described]:
    """Return the tensors ordered by decreasing item size, so that all are aligned in a file."""
    return dict(sorted(named.items(), key=lambda item: -item[1].dtype.itemsize))


def write_weights(
    folder: Path, named: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]], max_file_bytes: float
) -> None:
    """Write the weights of a model as transformers does, in files of at most `max_file_bytes` or one tensor.

    `tensors` are in the order of `named`, which is that of `widest_first`.
    """
    files = _divided(named, max_file_bytes)
    remaining, places = iter(tensors), dict[str, str]()
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if files[1:] else WEIGHTS
        _write_file(folder / file, {name: named[name] for name in names}, remaining)
        places |= dict.fromkeys(names, file)
    if files[1:]:
        index = {"metadata": {"total_size": sum(map(size_of, named.values()))}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _divided(named: Mapping[str, Described], max_file_bytes: float) -> list[list[str]]:
    """Return the tensor names of each file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, tensor in named.items():
        if files[-1] and filled + size_of(tensor) > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size_of(tensor)
    return files


def _write_file(file: Path, named: Mapping[str, Described], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write the header length, a JSON header with the offsets of the tensors, and their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, described in named.items():
        begin, end = end, end + size_of(described)
        dtype, shape = _NAMES[described.dtype], list(described.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with file.open("wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
        for name in named:
            tensor_name, tensor = next(tensors)
            assert tensor_name == name
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
