"""Plans of compiled layers against bytes that layers compiled by torch save; more methods in tests/full/memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from app.config.schema import RunConfig
from app.layers.activation_checkpointing import repeated_layers
from app.layers.attention import register
from app.memory.compiled_layers import LayerGraphs, kernels_of
from app.memory.estimate import plan_memory
from app.memory.fake_tensors import FakeTensorFallbacks, MetaModel, materialize
from app.model.build import ModelSections, assemble, build_training_model
from app.model.training_model import TrainingModel
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, memory_budget, sections_of
from tests.memory.truth import PACKED, batch_of, small_run

COMPILED = ("compile=blocks", "model.architecture.num_hidden_layers=2", "training.recompute=0", "precision=bf16")

# torch's compiler does both, and ignores its own warnings where pytest has not set that back
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def graphs_of_one_test() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def without_code(module: fx.GraphModule, *_args: Any, **_options: Any) -> Callable[[list[Any]], Any]:
    """Run the graphs of inductor as they are: writing and building C++ takes a minute."""

    def run(inputs: list[Any]) -> Any:
        return fx.Interpreter(module).boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def saved_bytes(model: TrainingModel) -> int:
    """Bytes that the backbone saves for the backward pass, without weights."""
    constants = [] if model.quantizer is None else model.quantizer.constants(model.network)
    kept = [*model.network.parameters(), *model.network.buffers(), *constants]
    weights = {each.untyped_storage()._cdata for each in kept}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), model.autocast(torch.device("cpu")):
        model.hidden_states(batch_of(PACKED))
    return sum(saved.values())


def planned_bytes(run: RunConfig, sections: ModelSections) -> int:
    """`saved_bytes` of the layers as a plan has them."""
    network = MetaModel(sections, register("sdpa", torch.device("cpu"))).network(2)
    with FakeTensorMode(allow_non_fake_inputs=True), FakeTensorFallbacks():  # type: ignore[no-untyped-call]
        materialize(network, sections)
        for layer in repeated_layers(network):
            layer.forward = LayerGraphs().compiled(memory_budget(sections.compile), layer, lambda forward: forward)
        return saved_bytes(assemble(network, sections, loss_of(run), None))


def check_saved_bytes(*words: str) -> None:
    from torch._inductor.compile_fx import compile_fx  # with a warning

    backend: Any = partial(compile_fx, inner_compile=without_code)  # type: ignore[arg-type]
    run = small_run(*COMPILED, *words)
    sections = sections_of(run, Choices(run.precision.kind, run.attention.kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda _name: backend)
        model = build_training_model(sections, loss_of(run), torch.device("cpu"), 0, "nowhere")
        saved = saved_bytes(model)
    assert model.compiled_layers is not None
    assert model.compiled_layers.graphs
    assert planned_bytes(run, sections) == pytest.approx(saved, rel=0.01)


def test_saved_bytes_of_compiled_layers_equal_plan() -> None:
    check_saved_bytes("recipe=lora")


def test_saved_bytes_of_compiled_layers_with_tiles_equal_plan() -> None:
    check_saved_bytes("recipe=lora", "training.tile=64")


def test_part_of_split_micro_batch_needs_less_than_compiled_whole() -> None:
    """A part misses the compiled shape, so its layers are recomputed instead."""
    half = replace(PACKED, width=96, documents=(60, 36), label_rows=65)
    whole = plan_memory(small_run(*COMPILED, "recipe=lora"), PACKED, "cpu", steps_only=True)
    own = ("training.recompute=true", "precision=bf16", "model.architecture.num_hidden_layers=2")
    part = plan_memory(small_run(*own, "recipe=lora"), half, "cpu", steps_only=True)
    assert part.peak_bytes < whole.peak_bytes


def test_kernels_of_two_products_write_what_products_and_outputs_read() -> None:
    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = (x * 2) @ weight, x @ weight
        return torch.sigmoid(gate) * gate * up

    graph = make_fx(compute)(torch.ones(2, 2), torch.ones(2, 2)).graph
    kernels = [each for each in kernels_of(graph) if each.is_fused]
    assert [[node.name for node in each.nodes] for each in kernels] == [["mul"], ["sigmoid", "mul_1", "mul_2"]]
    assert [[node.name for node in each.written] for each in kernels] == [["mul"], ["mul_2"]]
    assert {node.name for node in kernels[1].last_uses} == {"mm", "mm_1", "sigmoid", "mul_1"}
