"""A quantization and a kind of export of a test, as one entry in each table of their kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

from app.config.finished_run import EXPORT_KINDS, ExportConfig, ExportKind, export_config
from app.config.kinds import QuantizationKind
from app.config.validate import CHOICES
from app.export import export
from app.exports.kinds import Export, MergedExport
from app.exports.reload import logits
from app.exports.verify import Reference, Reloaded
from app.layers.quantization import Quantizer, weight_of
from app.tracking.console import Console
from tests.promise.conftest import Toys


class Int8Linear(nn.Linear):
    """A frozen layer of whole numbers, with few bits and a scale for each row."""

    scale: Tensor

    def __init__(self, weight: Tensor, bias: Any) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7  # a coarse one, so that rounding shows
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class Int8(Quantizer):
    kind = "int8"
    needed_by_adapter = True

    def quantized(self, layer: Any) -> nn.Module:
        return Int8Linear(weight_of(layer), layer.bias)

    def rounded(self, weight: Tensor) -> Tensor:
        layer = Int8Linear(weight, None)
        return (layer.weight * layer.scale).to(weight.dtype)

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:
        return f"{name} has {inputs} inputs and {outputs} outputs, an odd number" if outputs % 2 else None


INT8 = {
    "QUANTIZATIONS": lambda _config, _compute: Int8(),
    "QUANTIZATION_KINDS": QuantizationKind(
        "{} on an int8 base", ("quantization=nf4", "4 bits"), rounds_to="eight bits"
    ),
}


class NumpyExport(MergedExport):
    """The weights of a merged model as numpy's arrays."""

    def write(self, folder: Path) -> int:
        rounded = super().write(folder)
        arrays: dict[str, Any] = load_file(folder / "model.safetensors")
        np.savez(folder / "weights.npz", **arrays)
        (folder / "model.safetensors").unlink()
        return rounded

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        from transformers import AutoConfig, AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        weights = {name: torch.from_numpy(each) for name, each in np.load(folder / "weights.npz").items()}
        lm.load_state_dict(weights, strict=False)
        found = list(logits(lm, reference.rows, "cpu").values())
        return Reloaded(reference.ids, reference.loss(found), found)


@pytest.fixture
def run(toys: Toys) -> Path:
    """A run on a base of whole numbers."""
    toys.add("quantization", "int8", INT8)
    toys.choice("quantization", "int8", "kind: int8\n")
    large = "model.architecture.initializer_range=0.1"
    return toys.train("run", "recipe=lora", "quantization=int8", "optimizer.lr=2e-2", large)


def exported(toys: Toys, run: Path, name: str) -> dict[str, Any]:
    """What export.json says."""
    to = toys.folder / name
    config = export_config([f"run={run}", f"to={to}", "kind=numpy", "dtype=fp32"])
    code = export(config, Console(enabled=False))
    report: dict[str, Any] = json.loads((to / "export.json").read_text())
    assert report["passed"] == (code == 0)
    return report


def add_export(toys: Toys, kind: type[Any]) -> None:
    toys.add("export", "numpy", {"EXPORTS": kind, "EXPORT_KINDS": ExportKind(needs_adapter=True)})
    field = ExportConfig.__dataclass_fields__["kind"]
    toys.monkeypatch.setattr(field, "metadata", {CHOICES: tuple(EXPORT_KINDS)})  # as its import makes it


def test_quantization_is_what_plan_and_merge_count(toys: Toys, run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    counted, planned = manifest["memory"]["frozen_weights"], manifest["memory_plan"]["anatomy"]["frozen_weights"]
    assert planned == pytest.approx(counted, rel=0.01)
    base = sum(each.numel() for each in load_file(run / "base" / "model.safetensors").values())
    assert counted < 3.5 * base  # of four bytes each before
    add_export(toys, NumpyExport)
    assert exported(toys, run, "rounded")["difference"] < 1e-6
    exact = type("Exact", (Int8,), {"rounded": lambda _self, weight: weight})
    toys.add("quantization", "int8", INT8 | {"QUANTIZATIONS": lambda _config, _compute: exact()})
    assert exported(toys, run, "exact")["difference"] > 1e-2
    nothing = type("Nothing", (Int8,), {"rounded": Quantizer.rounded})
    toys.add("quantization", "int8", INT8 | {"QUANTIZATIONS": lambda _config, _compute: nothing()})
    with pytest.raises(TypeError, match=r"abstract method '?rounded"):
        exported(toys, run, "nothing")


class CoarseExport(NumpyExport):
    """Weights of three digits after the point."""

    def write(self, folder: Path) -> int:
        rounded, file = super().write(folder), folder / "weights.npz"
        arrays: dict[str, Any] = {name: each.round(3) for name, each in np.load(file).items()}
        np.savez(file, **arrays)
        return rounded


# what another program would say of it, and why it fails
SPOILT: list[tuple[Callable[[Reloaded, float], Reloaded], str | None]] = [
    (lambda found, _: found._replace(ids=[each + 1 for each in found.ids]), "tokens differ in row 0 of"),
    (lambda found, loss: found._replace(logits=None, loss=1.5 * loss), None),
    (lambda found, _: found._replace(logits=None, loss=float("nan")), None),
]


def spoilt(spoil: Callable[[Reloaded, float], Reloaded]) -> type[Any]:
    """An export whose reload is changed."""

    def reload(self: NumpyExport, folder: Path, reference: Reference) -> Reloaded:
        found = NumpyExport.reload(self, folder, reference)
        assert isinstance(found, Reloaded)
        assert found.loss is not None
        return spoil(found, found.loss)

    return type("Spoilt", (NumpyExport,), {"reload": reload})


def test_export_passes_by_its_own_reload_alone(toys: Toys, run: Path) -> None:
    add_export(toys, NumpyExport)
    report = exported(toys, run, "numpy")
    assert report["passed"]
    assert "weights.npz" in report["files"]
    add_export(toys, CoarseExport)
    assert not exported(toys, run, "coarse")["passed"]
    for at, (spoil, why) in enumerate(SPOILT):
        add_export(toys, spoilt(spoil))
        report = exported(toys, run, f"spoilt-{at}")
        assert not report["passed"]
        assert why is None or report["failure"].startswith(why)
    unread = type("Unread", (NumpyExport,), {"reload": lambda *_: "no program reads it"})
    add_export(toys, unread)
    assert exported(toys, run, "unread")["failure"] == "no program reads it"
    add_export(toys, type("Nameless", (Export,), {}))
    with pytest.raises(TypeError, match=r"abstract method '?copied"):
        exported(toys, run, "nameless")
