"""Verification of compiled layers: planted faults are found and named, right code passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.batch import Batch, PackedSequences
from app.config.schema import CompileConfig, QuantizationConfig
from app.layers.activation_checkpointing import repeated_layers
from app.model.training_model import TrainingModel
from app.model.verification import ComparedDocuments, verify_compiled
from tests.model import small
from tests.model.faults import FAULTS, Plant
from tests.model.test_compile import BLOCKS, blocks_of, graphs_of_one_test, packed

assert graphs_of_one_test  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LENGTHS = (90, 31, 150, 60, 40, 141)  # 512 tokens


UNCOMPILED = replace(BLOCKS, backend="eager")  # the layers' own operations


def model_of(
    layers: int, precision: str = "bf16", base: str = "none", compile: CompileConfig = UNCOMPILED, dropout: float = 0.0
) -> TrainingModel:
    """A model with a new adapter, whose B is zero, and norms that do something."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers, "initializer_range": 0.02}
    numbers = small.numbers("llama", max_position_embeddings=512, **sizes)
    model = small.training_model_of(
        "llama",
        small.lora(r=16, alpha=32.0, dropout=dropout),
        precision,
        quantization=QuantizationConfig(kind=base, double_quant=base == "nf4"),
        model=small.model_config("llama", architecture=numbers),
        compile=compile,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.network.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        if ".lora_B." in name:
            parameter.data.zero_()
    return small.with_one_graph(model)


def batch_of(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    batch = small.packed(small.documents_of(lengths))
    return replace(batch, documents=PackedSequences.from_lengths(lengths, max(lengths), 16))


def plant(model: TrainingModel, fault: Plant, patch: pytest.MonkeyPatch, only: int | None = None) -> None:
    """Let compiled layers compute with a fault, all of them or one."""
    layers = repeated_layers(model.network)

    def compiled(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if only is None or layer is layers[only]:
                fault(inner, layer, kwargs)
            return type(layer).forward(layer, *args, **kwargs)

    patch.setattr(blocks_of(model), "compiled", compiled)


@pytest.mark.parametrize(
    "name", ["adapter scale x 1.1", "documents joined in pairs", "gradient of A of k lost", "positions off by one"]
)
def test_verify_compiled_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(2)
    plant(model, FAULTS[name], monkeypatch)
    assert not verify_compiled(model, blocks_of(model), batch_of()).passed


def test_verify_compiled_fault_of_one_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(3)
    plant(model, FAULTS["product of down x 1.05"], monkeypatch, only=2)
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert str(found).startswith("layer 2, ")
    assert ": error " in str(found)
    assert "x that of the uncompiled layer (" in str(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_verify_compiled_same_forward_passes_and_changes_nothing(precision: str) -> None:
    model = model_of(2, precision)
    before = {name: each.clone() for name, each in model.network.state_dict().items()}
    state = torch.get_rng_state()
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert found.passed
    assert 0.5 < found.difference < 1.2 or precision == "fp32"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in model.network.state_dict().items())
    assert all(parameter.grad is None for parameter in model.network.parameters())


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_verify_compiled_dropout_hides_no_fault(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards draw the same masks; with masks of their own, errors of 30 % would hide one of 10 %."""
    model = model_of(2, dropout=0.1)
    if factor != 1.0:
        plant(model, FAULTS["adapter scale x 1.1"], monkeypatch)
    found = verify_compiled(model, blocks_of(model), batch_of())
    assert found.passed == (factor == 1.0), found


def test_verify_compiled_key_bias_without_signal_is_no_fault() -> None:
    """The exact gradient of a key's bias is zero, so all forwards differ in rounding alone."""
    model = small.training_model_of("qwen2", precision="bf16", compile=BLOCKS)
    found = verify_compiled(model, blocks_of(model), packed(0))
    assert found.passed, found


def test_verify_compiled_frozen_layers_are_compared_without_gradients() -> None:
    """The first layers of a model frozen up to its second layer have neither an input nor weights with gradients."""
    model = small.training_model_of("llama", freeze=("embed_tokens", "layers.0"), compile=UNCOMPILED)
    assert verify_compiled(model, blocks_of(model), packed(0)).passed
    graphs = blocks_of(model).graphs
    loss, _ = model(packed(1))  # a further graph would be an error
    loss.backward()
    assert blocks_of(model).graphs == graphs


@pytest.mark.parametrize(("causal", "taken"), [(True, (256, 60, 20, 128)), (False, (300, 60, 200))])
def test_compared_documents_are_first_last_and_between(causal: bool, taken: tuple[int, ...]) -> None:
    lengths = (300, 60, 20, 200)
    whole = batch_of(lengths)
    part = ComparedDocuments.of(whole, causal=causal)
    assert part.batch.lengths == taken
    assert torch.equal(part.batch.ids, whole.ids[:, part.places])
    assert {0, 380} <= set(part.places.tolist())
