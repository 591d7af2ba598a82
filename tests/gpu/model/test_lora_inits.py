"""EVA, CorDA and LoftQ on a GPU: what LoRA begins with there is what it begins with on a CPU."""

import pytest
import torch

from app.config.schema import QuantizationConfig
from app.model.build import build_training_model
from tests.model.small import distance, documents_of, lora, model_config, packed, sections, wide_numbers
from tests.model.test_lora_inits import layers_of, update_of


@pytest.mark.parametrize(("init", "bits"), [("eva", "nf4"), ("corda", "none"), ("loftq", "nf4")])
def test_init_on_a_gpu_equals_that_on_a_cpu(init: str, bits: str) -> None:
    rows = [packed(documents_of((30, 60, 20)))]
    base = QuantizationConfig(kind=bits, double_quant=True)
    parts = sections(model_config(architecture=wide_numbers("llama")), lora(init=init), quantization=base)
    on_cpu, on_gpu = (
        layers_of(build_training_model(parts, torch.device(device), 0, "base", rows=lambda: rows))
        for device in ("cpu", "cuda")
    )
    for name, layer in on_cpu.items():
        if init == "eva":  # directions, up to their signs
            a, b = (each[name].lora_A["default"].weight.detach().cpu() for each in (on_cpu, on_gpu))
            assert distance(a.T @ a, b.T @ b) <= 1e-2
        else:
            assert distance(update_of(layer), update_of(on_gpu[name]).cpu()) <= 1e-2
