"""A packed run starts only if packing changes nothing; the checks fit where a step fits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.batch import PackedSequences
from app.config.schema import CompileConfig
from app.data.collate import Packed
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data
from app.errors import EnvironmentProblem
from app.layers import attention
from app.layers.activation_checkpointing import repeated_layers
from app.layers.attention.requirements import Kernel, Rules
from app.layers.attention.sdpa import sdpa
from app.model.build import build_training_model
from app.model.checks import check_packing
from app.model.training_model import TrainingModel
from app.oom_retry import few_rows
from app.tasks.table import loss_of
from app.training.setup import check_on_loader
from app.training.storage_counter import StorageCounter
from tests.harness.scarcity import Scarce, scarce
from tests.model import small
from tests.training.conftest import sections_of, small_run, trainee_of


def leaking(first: int) -> Kernel:
    """A kernel whose documents from number `first` on see each other."""

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is not None:
            apart, together = documents.lengths[:first], sum(documents.lengths[first:])
            documents = replace(documents, lengths=(*apart, together))
        return sdpa(q, k, v, rules, documents)

    return run


def short_window(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """A kernel without a leak that is wrong all the same."""
    return sdpa(q, k, v, replace(rules, window=2), documents)


@pytest.mark.parametrize(
    ("name", "kernel", "precision", "remedy"),
    [
        ("sdpa", leaking(0), "fp32", "batching.packing=false"),
        ("varlen", leaking(0), "bf16", "attention=sdpa"),
        ("varlen", leaking(4), "fp32", "attention=sdpa"),
        ("varlen", leaking(4), "bf16", "attention=sdpa"),
        ("varlen", short_window, "fp32", "attention=sdpa"),
    ],
)
def test_check_packing_wrong_attention_is_refused(
    name: str,
    kernel: Kernel,
    precision: str,
    remedy: str,
    packed_loader_of: Callable[..., Loader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention.BACKENDS, name, attention.Backend(run=kernel, requires=lambda _device: []))
    model = trainee_of(small_run("recipe=full", f"precision={precision}", f"attention={name}"))
    with pytest.raises(EnvironmentProblem, match=rf"attention={name}: .* of kind llama .* Set {remedy}\.$"):
        check_packing(model, packed_loader_of(128, 1).with_most_rows())
    assert model.training
    attention.register("sdpa")


def test_check_packing_kind_that_mixes_documents_is_refused(packed_loader_of: Callable[..., Loader]) -> None:
    model = trainee_of(small_run("recipe=full"))
    norm = model.language_model.base_model.norm
    norm.register_forward_hook(lambda _module, _args, out: out + out.roll(1, dims=1))
    with pytest.raises(EnvironmentProblem, match=r"batching\.packing=true: a model of kind llama gives another logits"):
        check_packing(model, packed_loader_of(128, 1).with_most_rows())


def test_checks_leave_random_state_of_run(packed_loader_of: Callable[..., Loader]) -> None:
    run = small_run("recipe=lora", "adapter.dropout=0.5")
    model = trainee_of(run)
    state = torch.get_rng_state()
    check_on_loader(model, run.adapter, packed_loader_of(128, 1), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def test_check_on_loader_first_bin_of_one_document_still_checks_packing(data: Data) -> None:
    longest = int(data.train.lengths.max())
    layout = Packed(longest, pad_id=0, max_length=longest)
    loaders = (Loader(data.train, layout, StepSplit(1), seed) for seed in range(100))
    loader = next(each for each in loaders if len(each.batches(0)[0].lengths) == 1)
    run = small_run("recipe=full")
    model = trainee_of(run)
    comparisons = check_on_loader(model, run.adapter, loader, torch.device("cpu"))
    assert any("packed documents" in each.what for each in comparisons)
    attention.register_kernel(leaking(0), attention.NAME)
    with pytest.raises(EnvironmentProblem, match=r"attention=sdpa: "):
        check_on_loader(model, run.adapter, loader, torch.device("cpu"))
    attention.register("sdpa")


def peak_bytes(layers: int, recompute: bool) -> int:
    architecture = small.numbers("llama", num_hidden_layers=layers)
    model = small.training_model_of(
        "llama", small.lora(), model=small.model_config(architecture=architecture), recompute=recompute
    )
    forwards = [layer.forward for layer in repeated_layers(model)]
    counter = StorageCounter()
    counter.ignore(model.parameters())
    with counter:
        assert check_packing(model, small.packed(small.documents_of(DOCUMENTS)))
    assert [layer.forward for layer in repeated_layers(model)] == forwards
    return counter.peak


DOCUMENTS = (40,) * 8 + (9,) * 12


@pytest.mark.parametrize("recompute", [False, True])
def test_check_packing_each_layer_adds_one_input(recompute: bool) -> None:
    of_input = 4 * small.WIDTH * sum(DOCUMENTS)
    assert peak_bytes(6, recompute) - peak_bytes(2, recompute) <= 1.2 * 4 * of_input


def checked_within(
    tokens: int, where: str, model: TrainingModel, loader: Loader, depth: int = 0
) -> tuple[list[str], Scarce]:
    with scarce(where, tokens) as memory:
        found = check_on_loader(model, small_run().adapter, loader, torch.device("cpu"), depth)
    assert all(each.passed for each in found)
    return [each.what for each in found], memory


@pytest.mark.parametrize("where", ["forward", "backward", "recomputed"])
def test_checks_out_of_memory_are_repeated_on_few_rows(where: str, packed_loader_of: Callable[..., Loader]) -> None:
    model, loader = trainee_of(small_run("recipe=lora")), packed_loader_of(256, 1)
    forwards = [layer.forward for layer in repeated_layers(model)]
    expected = [each.what for each in check_on_loader(model, small_run().adapter, loader, torch.device("cpu"))]
    few = few_rows(loader.with_most_rows(), 4).num_tokens
    found, memory = checked_within(few, where, model, loader)
    assert (found, memory.times) == (expected, 1)
    assert model.training
    assert [layer.forward for layer in repeated_layers(model)] == forwards
    attention.register_kernel(leaking(0), attention.NAME)
    with pytest.raises(EnvironmentProblem, match=r"attention=sdpa: it gives another logits when documents are packed"):
        checked_within(few, where, model, loader)
    attention.register("sdpa")


def test_checks_out_of_memory_on_few_rows_end_run(packed_loader_of: Callable[..., Loader]) -> None:
    model, loader = trainee_of(small_run("recipe=lora")), packed_loader_of(256, 1)
    message = r"out of memory: a check of the model on \d+ tokens does not fit next to .*frozen weights 0\.00 GB"
    with pytest.raises(EnvironmentProblem, match=message):
        checked_within(3, "forward", model, loader)


def test_checks_out_of_memory_compile_no_layers(packed_loader_of: Callable[..., Loader]) -> None:
    run, blocks = small_run("recipe=lora"), CompileConfig(kind="blocks", backend="eager")
    loader = packed_loader_of(256, 1)
    parts = replace(sections_of(run), compile=blocks)
    model = build_training_model(parts, loss_of(run), torch.device("cpu"), run.seed, "nowhere")
    checked_within(few_rows(loader.with_most_rows(), 4).num_tokens, "forward", model, loader)
    (remark,) = model.remarks()
    assert "the checks before the first step ran out of memory" in remark
    layers = model.compiled_layers
    assert layers is not None
    assert (layers.graphs, layers.is_on) == (0, False)
