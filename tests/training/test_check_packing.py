"""A packed run starts only if packing changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.batch import PackedSequences
from app.data.collate import Packed
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data
from app.errors import EnvironmentProblem
from app.model import attention
from app.model.attention.requirements import Kernel, Rules
from app.model.attention.sdpa import sdpa
from app.model.checks import check_packing
from app.training.setup import check_on_loader
from tests.training.conftest import small_run, trainee_of


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
