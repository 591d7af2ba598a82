"""Weights of a finished run that differ from what was written: refused by every command that reads them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.files import CHECKSUMS, sha256
from tests.command.test_wrong_inputs import flip
from tests.harness.runs import FINISHED, FinishedRuns, Zygote

ADAPTER, BASE = Path("final/adapter_model.safetensors"), Path("base/model.safetensors")
EVALUATE, GENERATE = ("app.evaluate", "run=run"), ("app.generate", "run=run", "prompt=Hi")
EXPORT = ("app.export", "run=run", "kind=adapter", "to=exported")
START = ("app.train", *FINISHED["lora"], "adapter.start=run", "output_dir=next")


def resealed(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file, and its checksum."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    reseal(file)


def reseal(file: Path) -> None:
    manifest = file.parent / CHECKSUMS
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {file.name: sha256(file)}))


def without_one(file: Path) -> None:
    resealed(file, lambda tensors: tensors.pop(min(tensors)))


def with_nan(file: Path) -> None:
    resealed(file, lambda tensors: tensors[min(tensors)].view(-1)[:1].fill_(torch.nan))


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])
    reseal(file)


FLIPPED = "safetensors is not what was written"


@pytest.mark.parametrize(
    ("place", "damage", "command", "message"),
    [
        *((ADAPTER, flip, command, FLIPPED) for command in (EVALUATE, GENERATE, EXPORT, START)),
        *((BASE, flip, command, FLIPPED) for command in (EVALUATE, GENERATE, EXPORT)),
        (BASE, flip, (*GENERATE, "checkpoint=3"), FLIPPED),
        (Path("final/tokenizer.json"), flip, (*GENERATE, "checkpoint=3"), "tokenizer.json is not what was written"),
        *((ADAPTER, without_one, command, "differ in base_model.model") for command in (EVALUATE, GENERATE, START)),
        *((ADAPTER, with_nan, command, "has NaN, or numbers too large") for command in (EVALUATE, GENERATE, START)),
        *((ADAPTER, torn, command, "safetensors cannot be loaded (") for command in (EVALUATE, GENERATE, START)),
        (BASE, with_nan, GENERATE, "in model.safetensors has NaN, or numbers too large"),
    ],
)
def test_damaged_weights_are_refused(
    place: Path,
    damage: Callable[[Path], None],
    command: tuple[str, ...],
    message: str,
    finished: FinishedRuns,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    damage(finished.copy(tmp_path / "run") / place)
    module, *words = command
    zygote.refused(tmp_path, *words, module=module, message=message)
    assert not (tmp_path / "run" / "evaluate.json").exists()


@pytest.mark.parametrize("damaged", ["first", "second"])
def test_adapter_that_differs_from_its_checksums_is_not_combined(
    damaged: str, finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        finished.copy(tmp_path / name)
    flip(tmp_path / damaged / ADAPTER)
    words = ("run=first", "adapters=[first:0.5,second:0.5]", "kind=adapter", "to=exported")
    zygote.refused(tmp_path, *words, module="app.export", message=FLIPPED)


def test_whole_model_that_differs_from_its_checksums_is_refused(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run", "full")
    flip(run / "final" / "model.safetensors")
    zygote.refused(tmp_path, "model=run/final", "prompt=Hi", module="app.generate", message=FLIPPED)
    own = [word for word in FINISHED["full"] if not word.startswith("model.")]
    zygote.refused(tmp_path, *own, "model.path=run/final", "output_dir=next", message=FLIPPED)


def test_index_of_a_received_model_decides_neither_format_nor_weights(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    model = finished.copy(tmp_path / "run", "full") / "final"
    (model / CHECKSUMS).unlink()  # as a folder of another program
    tensors, index = load_file(model / "model.safetensors"), model / "model.safetensors.index.json"
    torch.save(tensors, model / "pytorch_model.bin")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}))
    ask = ("model=run/final", "prompt=Hi", "max_new_tokens=4")
    answered = zygote.run(tmp_path, *ask, module="app.generate", code=0)
    assert (
        answered.stderr
        == "note: run/final/model.safetensors.index.json is ignored, because model.safetensors is there too\n"
    )
    (model / "model.safetensors").rename(model / "other.safetensors")
    zygote.refused(tmp_path, *ask, module="app.generate", message="'pytorch_model.bin' is not the name of a .safetens")
