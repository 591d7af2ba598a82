"""EVA, CorDA and LoftQ: the initial adapter on a GPU, against that on a CPU or the definition."""

from pathlib import Path

import pytest
import torch

from app.config.schema import QuantizationConfig
from app.model.training_model import TrainingModel
from tests.model.small import (
    build_model,
    built,
    distance,
    documents_of,
    lora,
    model_config,
    packed,
    sections,
    wide_numbers,
)
from tests.model.test_adapters import layers_of, require_best_update, update_of

NUMBERS = wide_numbers("llama")


def begun_on(device: str, folder: Path, init: str, bits: str) -> TrainingModel:
    """Loaded from a folder: random weights are drawn on the model's device, where each has its own numbers."""
    rows = [packed(documents_of((30, 60, 20)))]
    base = QuantizationConfig(kind=bits, double_quant=True)
    parts = sections(model_config(path=str(folder), architecture=NUMBERS), lora(init=init), quantization=base)
    return build_model(parts, torch.device(device), 0, str(folder), rows=lambda: rows)


@pytest.mark.parametrize(("init", "bits"), [("eva", "nf4"), ("corda", "none")])
def test_init_from_inputs_on_gpu_equals_cpu(init: str, bits: str, tmp_path: Path) -> None:
    built("llama", "eager", **NUMBERS).save_pretrained(str(tmp_path))
    on_cpu, on_gpu = (layers_of(begun_on(device, tmp_path, init, bits)) for device in ("cpu", "cuda"))
    for name, layer in on_cpu.items():
        if init == "eva":  # directions, up to their signs
            a, b = (each[name].lora_A["default"].weight.detach().cpu() for each in (on_cpu, on_gpu))
            assert distance(a.T @ a, b.T @ b) <= 1e-2
        else:
            assert distance(update_of(layer), update_of(on_gpu[name]).cpu()) <= 1e-2


def test_loftq_on_gpu_begins_with_best_update(tmp_path: Path) -> None:
    """Not the update of a CPU: what packing lost is noise, whose singular vectors are hardly told apart."""
    base = built("llama", "eager", **NUMBERS)
    base.save_pretrained(str(tmp_path))
    require_best_update(begun_on("cuda", tmp_path, "loftq", "nf4"), base)
