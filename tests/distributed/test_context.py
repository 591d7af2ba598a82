"""Rows sliced over processes: the exchange of heads, labels of slices, and models that cannot be sliced."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from app.batch import IGNORE, LossWeights, PackedSequences
from app.distributed.context import ContextGroup, context_group
from app.distributed.process_group import Runtime
from app.errors import AppError
from app.layers.attention.exchange import by_heads, exchange_problems
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import plain_packed
from app.model.checks import check_slices
from tests.harness.processes import ProcessesByCount
from tests.model.small import built, distance, documents_of, lora, model_config, numbers, packed, training_model_of

PROCESSES = 3


def group_of(runtime: Runtime) -> ContextGroup:
    group = context_group(PROCESSES, runtime.processes, runtime.rank)
    assert group is not None
    return group


def distance_to_plain_attention(runtime: Runtime, key_heads: int) -> float:
    """Of output and gradients, from attention over the whole row, with a window, sinks and values of another size."""
    group, (heads, tokens) = group_of(runtime), (6, 21)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = q, k, v = drawn(1, heads, tokens, 8), drawn(1, key_heads, tokens, 8), drawn(1, key_heads, tokens, 4)
    sinks, weights = drawn(heads), drawn(1, heads, tokens, 4).detach()
    rules = Rules(causal=True, scale=None, dropout=0.0, window=4, softcap=None, sinks=sinks)
    documents = PackedSequences.from_lengths((5, 9, 7))
    expected = plain_packed(q, k, v, rules, documents)
    gradients = torch.autograd.grad((expected * weights).sum(), (*inputs, sinks))

    part = slice(group.index * tokens // PROCESSES, (group.index + 1) * tokens // PROCESSES)
    slices = q, k, v = tuple(states[:, :, part].detach().requires_grad_() for states in inputs)
    out = by_heads(plain_packed, q, k, v, rules, replace(documents, exchange=group))
    *of_slices, of_sinks = torch.autograd.grad((out * weights[:, :, part]).sum(), (*slices, sinks))
    group.sum_in_place(of_sinks)
    whole = [expected, *gradients[:3]]
    return distance([out, *of_slices, of_sinks], [*(states[:, :, part] for states in whole), gradients[3]])


@pytest.mark.parametrize("key_heads", [6, 3, 1])
def test_exchange_of_heads_equals_plain_attention(processes: ProcessesByCount, key_heads: int) -> None:
    assert max(processes(PROCESSES).run(distance_to_plain_attention, key_heads)) <= 1e-12


@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_have_every_token_and_label_once(size: int) -> None:
    batch = packed(documents_of((20, 5, 11, 3)), labels_from=3, filling=2)
    weights = torch.rand(batch.num_labels)
    batch = replace(batch, weights=LossWeights(weights, float(weights.sum())))
    parts = [ContextGroup(index, size).part(batch, torch.device("cpu")) for index in range(size)]
    ids, positions = (torch.cat([getattr(part, name)[0] for part in parts]) for name in ("ids", "positions"))
    assert ids[: batch.ids.numel()].equal(batch.ids[0])
    assert positions[: batch.ids.numel()].equal(batch.positions[0])
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert sum(part.label_weight for part in parts) == pytest.approx(batch.label_weight)
    labeled = [part for part in parts if part.num_labels]
    assert torch.cat([part.targets for part in labeled]).equal(batch.targets)
    assert torch.cat([part.weights.per_target for part in labeled if part.weights]).equal(weights)
    width = ids.numel() // size
    rows = [part.label_rows + index * width for index, part in enumerate(parts) if part.num_labels]
    assert torch.cat(rows).equal(batch.label_rows)
    assert all(part.targets.tolist() == [IGNORE] for part in parts if not part.num_labels)
    for part in parts:
        assert part.documents is not None
        bounds = part.documents.cu_seqlens.tolist()
        assert [end - start for start, end in pairwise(bounds)] == list(part.documents.lengths)
        assert bounds[-1] == ids.numel()


def checked(runtime: Runtime, mixes_tokens: bool) -> str:
    """What is compared, or the refusal."""
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = training_model_of(adapter=lora(), model=model_config(architecture=numbers("llama", **heads)))
    if mixes_tokens:
        layer = model.language_model.model.layers[0]
        layer.mlp.register_forward_hook(lambda _module, _arguments, out: out + out.roll(1, dims=1))
    several = replace(runtime, context=group_of(runtime))
    try:
        (comparison,) = check_slices(model, packed(documents_of((20, 5, 11, 4))), several)
    except AppError as refusal:
        return str(refusal)
    return comparison.what


def test_model_whose_layers_mix_tokens_is_refused(processes: ProcessesByCount) -> None:
    several = processes(PROCESSES)
    assert several.run(checked, False) == ["states and gradients of a sliced row against the whole row"] * PROCESSES
    refusals = several.run(checked, True)
    assert all(text.startswith("parallel.context=3: a model of kind llama computes different") for text in refusals)


@pytest.mark.parametrize(
    ("kind", "size", "chunk", "problem"),
    [
        ("llama", 2, None, ""),  # four query heads, two key heads
        ("llama", 4, None, ""),
        ("llama", 3, None, "4 query heads and 2 key heads. Query heads must be a multiple of"),
        ("llama", 8, None, "Set parallel.context to 1, 2, 4."),
        ("qwen3_next", 2, None, "recurrent and linear attention layers of qwen3_next models"),
        ("llama", 2, 64, "llama models have chunked attention (chunks of 64 tokens)"),
    ],
)
def test_exchange_problems(kind: str, size: int, chunk: int | None, problem: str) -> None:
    problems = list(exchange_problems(built(kind), size, chunk))
    assert len(problems) == bool(problem)
    assert all(problem in text for text in problems)
