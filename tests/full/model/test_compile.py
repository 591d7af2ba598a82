"""Compiled layers with inductor's code, kernels compiled for Hopper, and planted faults."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from app.config.adapters import METHODS as METHODS_OF_PEFT
from app.config.adapters import compile_obstacle
from app.config.schema import AdapterConfig
from app.layers.activation_checkpointing import repeated_layers
from app.layers.attention import register
from app.layers.compile import compile_blocks
from app.model.training_model import TrainingModel
from app.model.verification import verify_compiled
from tests.full.model.test_adapter_methods import FIELDS
from tests.full.model.wide_backend import WIDE
from tests.model import small
from tests.model.faults import FAULTS, FINE_FAULTS, Plant, weights_of
from tests.model.test_compile import (
    BLOCKS,
    CPU,
    GRAPHS,
    INDUCTOR,
    METHODS,
    blocks_of,
    by_its_own,
    check_run,
    graphs_of_one_test,
    kept_bytes,
    max_difference,
    outcome,
    packed,
)
from tests.model.test_partition import check_backward_graph
from tests.model.test_verification import batch_of, model_of, plant

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


ADAPTERS = {
    **{name: AdapterConfig(kind="peft", method=name, fields=FIELDS.get(name, {})) for name in METHODS_OF_PEFT},
    "LoRA": small.lora(),
    "DoRA": small.lora(dora=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductor_code_equals_uncompiled(mode: str) -> None:
    given = METHODS["lora"]
    expected = by_its_own(range(1, 3), **given)
    training_model = small.training_model_of("llama", compile=replace(INDUCTOR, mode=mode), recompute=1, **given)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    for seed, wanted in enumerate(expected, 1):
        assert max_difference(outcome(training_model, packed(seed)), wanted) <= 1e-5
    assert blocks_of(training_model).graphs == GRAPHS["lora"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_layers_keep_less_than_uncompiled_ones() -> None:
    compiled = small.training_model_of("llama", compile=INDUCTOR, recompute=0, **METHODS["lora"])
    assert small.verified(compiled, packed(0)) is not None, blocks_of(compiled).fault
    kept = kept_bytes(compiled, packed(0))  # before another model registers its attention
    plain = small.training_model_of("llama", recompute=0, **METHODS["lora"])
    assert 0 < kept < kept_bytes(plain, packed(0)) / 1.5


@pytest.mark.parametrize(("method", "recompute"), [("full", 1), ("qlora", True), ("int8", 1)])
def test_compiled_run_equals_uncompiled(method: str, recompute: bool | int) -> None:
    check_run(method, recompute)


@pytest.mark.parametrize(("kind", "graphs"), [("gemma3_text", 2), ("bert", 1)])
def test_compiled_layers_not_alike_have_own_graphs(kind: str, graphs: int) -> None:
    (expected,) = by_its_own(range(1, 2), kind)
    training_model = small.training_model_of(kind, compile=BLOCKS)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    assert proof.passed
    assert max_difference(outcome(training_model, packed(1)), expected) <= 1e-5
    assert blocks_of(training_model).graphs == graphs


@pytest.mark.filterwarnings("default")  # Dynamo cannot trace a warning that is an error
@pytest.mark.parametrize("name", ADAPTERS)
def test_compile_obstacle_of_adapter_names_what_cannot_be_traced(name: str) -> None:
    """No flag is older than the installed PEFT."""
    adapter = ADAPTERS[name]
    wide = small.model_config(architecture=small.wide_numbers("llama"))
    model = small.training_model_of("llama", adapter, "bf16", model=wide)
    register("sdpa", CPU)
    compile_blocks(model.network, replace(BLOCKS, backend="eager"))
    try:
        is_traced = bool(torch.isfinite(model(packed(0))[0]))
    except torch._dynamo.exc.TorchDynamoException:
        is_traced = False
    assert is_traced == (compile_obstacle(adapter) is None)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_backward_graph_of_fp8_layer_computes_products_as_often_as_gradients_need() -> None:
    check_backward_graph("fp8")


def test_compiled_bf16_passes_comparison() -> None:
    training_model = small.training_model_of("llama", small.lora(), "bf16", compile=BLOCKS)
    proof = small.verified(training_model, packed(0))
    assert proof is not None, blocks_of(training_model).fault
    assert proof.passed


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
