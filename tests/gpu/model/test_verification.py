"""Verification of compiled layers on a GPU: inductor's code passes for every base, planted faults are found."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.config.schema import AdapterConfig, CompileConfig, LaunchConfig, QuantizationConfig
from app.distributed.process_group import start
from app.layers.attention import register
from app.model.training_model import TrainingModel
from tests.gpu.model.test_compile import packed
from tests.model import small
from tests.model.faults import FAULTS
from tests.model.small import build_model
from tests.model.test_verification import plant

pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    register("sdpa")


def model_of(
    precision: str = "bf16", base: str = "none", adapter: AdapterConfig | None = None, tile: int = 0, **compiled: Any
) -> TrainingModel:
    runtime = start(LaunchConfig(num_processes=1, threads=1), precision, seed=0)
    parts = small.sections(
        small.model_config("llama", architecture=small.wide_numbers("llama")),
        adapter or small.lora(),
        precision,
        compile=CompileConfig(kind="blocks", **compiled),
        quantization=QuantizationConfig(kind=base, double_quant=base == "nf4"),
        tile=tile,
    )
    return build_model(replace(parts, attention="varlen"), runtime.device, seed=0, base_path="base")


GIVEN: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "nf4": {"base": "nf4"},
    "int8": {"base": "int8"},
    "fp8": {"base": "fp8"},
    "dropout": {"adapter": small.lora(dropout=0.1)},
    "full": {"adapter": small.full()},
    "graphs": {"graphs": True},
    **{f"{base} in tiles": {"base": base, "tile": 128} for base in ("none", "nf4", "fp8")},
}


@pytest.mark.parametrize("name", GIVEN)
def test_verify_compiled_code_of_inductor_passes(name: str) -> None:
    model = model_of(**GIVEN[name])
    layers, batch = model.compiled_layers, packed(0).to(torch.device("cuda"))
    assert layers is not None
    assert small.verified(model, batch) is not None, layers.fault
    loss, _ = model(batch)  # a further graph would be an error
    loss.backward()
    assert bool(torch.isfinite(loss))


@pytest.mark.parametrize("fault", ["adapter scale x 1.1", "gradient of A of k lost", "documents joined in pairs"])
def test_verify_compiled_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    plant(model, FAULTS[fault], monkeypatch)
    assert small.verified(model, packed(0).to(torch.device("cuda"))) is None
