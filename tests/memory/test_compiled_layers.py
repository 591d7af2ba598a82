"""Plans of compiled layers against bytes that layers compiled by torch save; more methods in tests/full/memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from app.memory.estimate import plan_memory
from app.model.build import build_training_model
from app.model.training_model import TrainingModel
from app.training.choices import Choices, sections_of
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
    """Bytes that the backbone leaves for head and backward pass, without parameters."""
    constants = [] if model.quantizer is None else model.quantizer.constants(model.network)
    kept = [*model.network.parameters(), *model.network.buffers(), *constants]
    weights = {each.untyped_storage().data_ptr() for each in kept}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), model.autocast(torch.device("cpu")):
        pack(model.hidden_states(batch_of(PACKED)))
    return sum(saved.values())


def check_saved_bytes(*words: str) -> None:
    from torch._inductor.compile_fx import compile_fx  # with a warning

    run = small_run(*COMPILED, *words)
    sections = sections_of(run, Choices(run.precision.kind, run.attention.kind))
    planned = plan_memory(run, PACKED, "cpu", exact=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda _name: partial(compile_fx, inner_compile=without_code))
        model = build_training_model(sections, torch.device("cpu"), 0, "nowhere")
        saved = saved_bytes(model)
    assert planned.largest["saved_activations"] == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("budget", [0.6, 0.3])
def test_saved_bytes_of_compiled_layers_equal_plan(budget: float) -> None:
    check_saved_bytes("recipe=lora", f"compile.memory_budget={budget}")
