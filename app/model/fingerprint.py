"""A hash by which the weights of a folder are known again, without reading all of them."""

import hashlib
import json
from pathlib import Path

from app.config.schema import ModelConfig
from app.model.source import folder_at_hand

_BLOCKS = 64
_BLOCK = 64 << 10
_INDEX = "model.safetensors.index.json"


def base_fingerprint(model: ModelConfig) -> str | None:
    """Of the weights that `model.path` names on this machine; None where they were drawn, or are not at hand."""
    folder = None if model.weights == "random" else folder_at_hand(model)
    files = [] if folder is None else weight_files(folder)
    return weights_fingerprint(files) if files and all(file.is_file() for file in files) else None


def weights_fingerprint(files: list[Path]) -> str:
    """Of names, sizes and 64 blocks of 64 KiB, spread evenly over each file; files of up to 4 MiB are read whole.

    A training changes nearly all weights, so another model differs in nearly every block. A single damaged byte of a
    large file may lie between them.
    """
    content = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        content.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(_BLOCKS):
                stream.seek(max(i * _BLOCK, i * (size - _BLOCK) // (_BLOCKS - 1)))
                content.update(stream.read(_BLOCK))
    return content.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers would read; a folder of the hub may hold others besides."""
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
