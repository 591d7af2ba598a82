"""Packed attention, and padded rows through the model's own attention where ours cannot replace it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.base.base_model import first_position
from app.batch import Batch
from app.config.schema import TaskConfig
from app.errors import EnvironmentProblem
from app.layers.attention import NAME, register
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import plain, sdpa, shares_heads
from app.layers.operations import as_on_gpu
from app.model.checks import check_causal, check_head, check_packing
from app.model.training_model import TrainingModel
from tests.choices import pairwise
from tests.model import classes, small
from tests.model.small import ALL_KINDS, ENCODERS, batch_of, built, documents_of, packed

PLAIN = Rules(causal=True, scale=None, dropout=0.0, window=None, softcap=None, sinks=None)
LENGTHS = (20, 5, 11)  # longer than the window of 8, shorter, and neither
DOCUMENTS = documents_of(LENGTHS)


def separate(lm: Any, attention: str = "eager") -> list[Tensor]:
    """Hidden states of each document alone, by the model's own attention and positions."""
    lm.set_attn_implementation(attention)
    try:
        return [lm.base_model(input_ids=d[None], use_cache=False)[0][0] for d in DOCUMENTS]
    finally:
        lm.set_attn_implementation(NAME)


def in_rows(lm: Any) -> list[Tensor]:
    """Hidden states through our attention, one document a row with padding on the right."""
    hidden = hidden_of(lm, batch_of(DOCUMENTS, isolate=lm.config.model_type in ENCODERS))
    return [hidden[r, :n] for r, n in enumerate(LENGTHS)]


def side_by_side(lm: Any) -> list[Tensor]:
    """Hidden states through our attention, all documents in one row."""
    return list(torch.split(hidden_of(lm, packed(DOCUMENTS))[0], list(LENGTHS)))


def hidden_of(lm: Any, batch: Batch) -> Tensor:
    hidden: Tensor = lm.base_model(
        input_ids=batch.ids,
        position_ids=batch.positions + first_position(lm),
        use_cache=False,
        documents=batch.documents,
    )[0]
    return hidden


def gradient_of(lm: Any, hidden: list[Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    lm.zero_grad()
    sum((h * torch.randn(h.shape, generator=generator)).sum() for h in hidden).backward()  # type: ignore[union-attr]
    return {n: p.grad.clone() for n, p in lm.named_parameters() if p.grad is not None}


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any two numbers."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


def _ours() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping[NAME]


def recorded(lm: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that each layer gives to our function."""
    from transformers import AttentionInterface

    register("sdpa")
    ours, calls = _ours(), []

    def spy(*args: Any, **layer: Any) -> Any:
        calls.append((args, layer))
        return ours(*args, **layer)

    AttentionInterface.register(NAME, spy)
    try:
        in_rows(lm)
    finally:
        register("sdpa")
    return calls


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_attention_called_without_mask_and_with_unrepeated_keys(kind: str) -> None:
    lm = built(kind)
    calls = recorded(lm)
    assert len(calls) == 2
    heads = 4 if kind in {"gpt2", *ENCODERS} else 2
    for args, layer in calls:
        assert args[4] is None
        assert "attention_mask" not in layer
        assert args[2].shape[1] == heads, "keys"
        assert args[3].shape[1] == heads, "values"


def sdpa_rows(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    return sdpa(q, k, v, rules, None)


@pytest.mark.parametrize("backend", [sdpa_rows, plain])
def test_sdpa_shared_heads_not_repeated(backend: Any) -> None:
    q, k, v = heads_of(12, 8, 1, size=16)
    rules = replace(PLAIN, softcap=2.0 if backend is plain else None)
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        backend(q, k, v, rules)
    # a repeated key or value would be as large as the query; sdpa alone keeps such a thing, its output
    known = {t.data_ptr() for t in (q, k, v)}
    as_large = [t.shape for p, t in saved.items() if p not in known and t.numel() == q.numel()]
    assert len(as_large) == (1 if backend is sdpa_rows else 0), as_large


def heads_of(length: int, query: int, key: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, n, length, size, generator=generator).requires_grad_() for n in (query, key, key)]
    return made[0], made[1], made[2]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """The definition, a query at a time, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for b, h, i in itertools.product(*(range(n) for n in q.shape[:3])):
        g = h * k.shape[1] // q.shape[1]
        near = [
            j
            for j in range(k.shape[2])
            if (j <= i or not rules.causal) and (rules.window is None or abs(i - j) < rules.window)
        ]
        scores = (k[b, g, near].double() @ q[b, h, i].double()) * (rules.scale or q.shape[-1] ** -0.5)
        if rules.softcap is not None:
            scores = torch.tanh(scores / rules.softcap) * rules.softcap
        if rules.sinks is not None:
            scores = torch.cat([scores, rules.sinks[h : h + 1].double()])
        out[b, h, i] = torch.softmax(scores, 0)[: len(near)] @ v[b, g, near].double()
    return out


@pytest.mark.parametrize(
    ("window", "more", "causal"),
    pairwise([None, 1, 3, 7, 20], [(None, False), (1.5, False), (None, True)], [True, False]),
)
def test_sdpa_and_plain_follow_definition(causal: bool, window: int | None, more: tuple[float | None, bool]) -> None:
    softcap, sinks = more
    q, k, v = heads_of(7, 4, 2)
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0]) if sinks else None
    rules = Rules(causal=causal, scale=0.7, dropout=0.0, window=window, softcap=softcap, sinks=sink)
    expected = one_by_one(q, k, v, rules)
    for backend in (sdpa_rows, plain):
        assert largest([backend(q, k, v, rules)], [expected]) <= 2e-6, backend.__name__


@pytest.mark.parametrize("backend", [sdpa_rows, plain])
def test_sdpa_values_narrower_than_keys(backend: Any) -> None:
    q, k, v = heads_of(7, 4, 2)
    rules = replace(PLAIN, window=3)
    assert largest([backend(q, k, v[..., :5], rules)], [backend(q, k, v, rules)[..., :5]]) <= 1e-6


def test_attention_dropout_only_in_training() -> None:
    lm = built("llama", attention_dropout=0.5)
    assert torch.equal(in_rows(lm)[0], in_rows(lm)[0])
    lm.train()
    assert not torch.equal(in_rows(lm)[0], in_rows(lm)[0])
    # some kinds name their dropout in evaluation too
    q, k, v = heads_of(7, 4, 2)
    layer = torch.nn.Module().eval()
    first, again = (_ours()(layer, q, k, v, None, dropout=0.5)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_attention_name_not_in_saved_model_nor_a_kernel_of_the_hub(tmp_path: Path) -> None:
    assert not {"/", "|"} & set(NAME)
    assert "flash" not in NAME
    built("llama").save_pretrained(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert NAME not in json.dumps(written)
    assert not [key for key in written if "attn_impl" in key]


class CallsOfTorch(TorchFunctionMode):
    """Heads of keys, and whether they are said to be shared, in each call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.seen.append((args[1].shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 4])
def test_sdpa_on_gpu_repeats_keys_that_no_fused_kernel_shares(window: int | None) -> None:
    """This device is no Ampere GPU, and the numbers are float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator).requires_grad_() for heads in (4, 2, 2))
    rules = replace(PLAIN, window=window)
    shared = sdpa(q, k, v, rules, None)
    with as_on_gpu(), CallsOfTorch() as calls:
        repeated = sdpa(q, k, v, rules, None)
    assert calls.seen == [(4, False)]
    both = [[out, *torch.autograd.grad(out.square().sum(), (q, k, v))] for out in (shared, repeated)]
    assert largest(*both) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "sizes", "masked", "ampere", "shares"),
    [
        (torch.bfloat16, (128, 128), False, True, True),
        (torch.float16, (256, 256), False, True, True),
        (torch.float32, (128, 128), False, True, False),
        (torch.bfloat16, (128, 128), True, True, False),
        (torch.float16, (128, 128), False, False, False),
        (torch.bfloat16, (320, 320), False, True, False),
        (torch.bfloat16, (192, 128), False, True, False),
    ],
)
def test_heads_are_shared_where_torch_has_a_kernel_for_it(
    dtype: torch.dtype, sizes: tuple[int, int], masked: bool, ampere: bool, shares: bool
) -> None:
    q, v = (torch.zeros(1, 1, 1, size, dtype=dtype) for size in sizes)
    assert shares_heads(q, v, masked=masked, ampere=ampere) is shares


PADDED_DOCUMENTS = small.documents_of((20, 5, 11))
BLOOM = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_XLM = {"model_type": "xlm", "vocab_size": 64, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "dropout": 0.0}
_UNDROPPED = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"), 0.0)


def own(architecture: dict[str, Any], task: TaskConfig) -> TrainingModel:
    model = small.model_config(architecture={"initializer_range": 0.3, **architecture})
    return small.training_model_of("", small.lora(), model=model, task=task, attention="own")


def encoder(kind: str) -> dict[str, Any]:
    return {**small.numbers("bert"), "model_type": kind, **_UNDROPPED}


def compare(model: TrainingModel, batch: Batch, loss_alone: Any) -> None:
    """The loss and every gradient, as each document alone gives them."""
    loss, found = small.outcome(model, batch)
    expected_loss, expected = small.outcome(model, lambda: torch.stack(loss_alone(model.language_model)).sum())
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert small.distance(found, expected) <= 1e-5
    assert all(each.passed for each in (check_head(model, batch), *check_packing(model, batch)))


def test_own_attention_of_a_decoder_equals_one_document_at_a_time() -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None], use_cache=False).logits[0, :-1] for each in PADDED_DOCUMENTS]
        return [
            F.cross_entropy(out, ids[1:], reduction="sum") for out, ids in zip(logits, PADDED_DOCUMENTS, strict=True)
        ]

    model = own(BLOOM, TaskConfig(kind="causal"))
    assert [each.difference for each in check_causal(model, small.batch_of(PADDED_DOCUMENTS))] == [0.0]
    compare(model, small.batch_of(PADDED_DOCUMENTS), alone)


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_own_attention_of_an_encoder_does_not_see_padding(kind: str) -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None]).logits[0, :-1] for each in PADDED_DOCUMENTS]
        return [
            F.cross_entropy(out, ids[1:], reduction="sum") for out, ids in zip(logits, PADDED_DOCUMENTS, strict=True)
        ]

    model = own(encoder(kind), TaskConfig(kind="masked", mask_share=0.15))
    compare(model, small.batch_of(PADDED_DOCUMENTS, isolate=True), alone)


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_own_attention_of_a_classifier_does_not_see_padding(kind: str) -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None]).logits for each in classes.DOCUMENTS]
        targets = (torch.tensor([each]) for each in classes.TARGETS)
        return [F.cross_entropy(out, target) for out, target in zip(logits, targets, strict=True)]

    compare(own(encoder(kind), classes.CLASSES), classes.in_rows("bert"), alone)


def test_own_attention_that_sees_later_tokens_is_refused() -> None:
    model = own({**_XLM, "causal": True}, TaskConfig(kind="causal"))
    assert check_causal(model, small.batch_of(PADDED_DOCUMENTS))[0].passed
    model = own({**_XLM, "causal": False}, TaskConfig(kind="causal"))
    with pytest.raises(EnvironmentProblem, match="of kind xlm tokens attend to later tokens"):
        check_causal(model, small.batch_of(PADDED_DOCUMENTS))
