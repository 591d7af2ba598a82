"""Verification of compiled layers: every planted fault is found, and a compiler that fuses all it can passes."""

from dataclasses import replace
from functools import cache

import pytest

from app.layers.activation_checkpointing import repeated_layers
from app.model.training_model import TrainingModel
from app.model.verification import verify_compiled
from tests.full.model.wide_backend import WIDE
from tests.model.faults import FAULTS, FINE_FAULTS, Plant, weights_of
from tests.model.test_compile import BLOCKS, blocks_of, graphs_of_one_test
from tests.model.test_verification import batch_of, model_of, plant

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LAYERS = 4
ON_BASE = {"none": FAULTS | FINE_FAULTS, "nf4": FAULTS, "fp8": FAULTS}  # faults that are found on each base


@cache
def shared_model(base: str) -> TrainingModel:
    """A model for all faults: planting one replaces its compiled layers, so nothing is compiled."""
    return model_of(LAYERS, base=base)


def require_found(model: TrainingModel, fault: Plant, patch: pytest.MonkeyPatch, only: int | None = None) -> str:
    """Return the message of the failed comparison."""
    plant(model, fault, patch, only)
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert not found.passed, found
    return str(found)


@pytest.mark.parametrize(("base", "name"), [(base, name) for base, faults in ON_BASE.items() for name in faults])
def test_verify_compiled_planted_fault_is_found(base: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found(shared_model(base), (FAULTS | FINE_FAULTS)[name], monkeypatch)


@pytest.mark.parametrize("base", ON_BASE)
def test_verify_compiled_adapter_dropped_in_last_layer_is_found_there(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = require_found(shared_model(base), FAULTS["adapter dropped"], monkeypatch, only=LAYERS - 1)
    assert message.startswith(f"layer {LAYERS - 1}, ")


@pytest.mark.parametrize("base", ["none", "fp8"])
def test_verify_compiled_weights_of_first_layer_in_all_layers_are_found(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(base)
    message = require_found(model, weights_of(repeated_layers(model.network)[0]), monkeypatch)
    assert not message.startswith("layer 0")


@pytest.mark.parametrize("base", ON_BASE)
def test_verify_compiled_without_fault_passes(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(base)
    plant(model, lambda _patch, _layer, _kwargs: None, monkeypatch)
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert found.passed, found


@pytest.mark.parametrize(
    ("layers", "precision", "base"),
    [
        *((layers, "bf16", base) for layers in (2, 8) for base in ("none", "nf4", "fp8")),
        *((layers, "fp16", "none") for layers in (2, 8)),
        (32, "bf16", "none"),
    ],
)
def test_verify_compiled_fused_layers_pass(layers: int, precision: str, base: str) -> None:
    """Of correct layers that round less often than their own forward, errors differ from its errors."""
    model = model_of(layers, precision, base, compile=replace(BLOCKS, backend=WIDE))
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert found.passed, found
