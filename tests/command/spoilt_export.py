"""app.export with something wrong while it writes, or between writing and proving: `SPOIL` says what."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from app import export
from app.exports import kinds
from app.exports.kinds import MergedExport, QuantizedExport
from app.layers.quantization import Bits4


def _one_tensor(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "layers.1.self_attn.v_proj" in name)
    tensors[name] = -tensors[name]
    save_file(tensors, file, {"format": "pt"})


def _cut_off(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])


def _as_it_was(_packing: Bits4, weight: Tensor) -> Tensor:
    """The base as it was before it was packed: the careless way to merge."""
    return weight


def _spoil_files(spoil: Callable[[Path], None], kind: type[MergedExport] = MergedExport) -> None:
    write = kind.write

    def spoilt(self: Any, folder: Path) -> int:
        rounded = write(self, folder)
        spoil(folder)
        return rounded

    kind.write = spoilt  # type: ignore[method-assign]


def main() -> None:
    match os.environ["SPOIL"]:
        case "careless":
            Bits4.rounded = _as_it_was  # type: ignore[assignment]
        case "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        case "tensor":
            _spoil_files(_one_tensor)
        case "saved":
            _spoil_files(_one_tensor, QuantizedExport)
        case "base":
            kinds.read_updates = lambda *_: {}  # type: ignore[attr-defined]
        case "cut":
            _spoil_files(_cut_off)
    export.main()
