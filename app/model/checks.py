"""Checks before the first step: loss head, packing, padding and adapted layers.

Documents in one row, or in padded rows, are compared with separate documents through the model's own plain attention:
logits, the gradient at the embeddings through all layers, and the gradients of trained parameters in one layer of each
kind. A search for leaks between documents would pass models that are wrong without leaking.
"""

import contextlib
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from app.adapters.adapters import adapter_of, require_gradient, trained_copies
from app.base.weight_files import without_peft
from app.batch import IGNORE, Batch, PackedSequences
from app.config.kinds import OWN, without_numbers
from app.config.schema import AdapterConfig
from app.errors import EnvironmentProblem
from app.layers.activation_checkpointing import recomputing, repeated_layers
from app.layers.attention import NAME, own_attention, register_kernel
from app.layers.attention.sdpa import plain_packed
from app.layers.comparison import Comparison, attempt, max_difference, max_or_nan
from app.layers.head import LinearHead, head_parameters, token_loss_sum
from app.layers.operations import autocast_dtype, uses_kernels
from app.layers.recurrent import recurrent_mixers
from app.model.training_model import TrainingModel, evaluating

_MAX_DOCUMENTS = 4  # of a classification, compared one by one
_MAX_PACKED_TOKENS = 2048  # per pass of the packing check
_MAX_COMPARED_LOGITS = 512  # tokens, spread over all documents
# lengths of truncated documents: few, for few passes, and none a multiple of a kernel's tile
_PACKED_LENGTHS = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_PACKING_FP32 = {"logits": 1e-5, "gradients": 1e-4}  # limits if everything is float32
_PACKING_FACTOR = 3  # else the limit, as a multiple of the difference of the model's own kernels

_HEAD_TOKENS = 64
_HEAD_TOLERANCE = 1e-5  # relative to the largest logit, in float32


@torch.no_grad()
def check_head(model: TrainingModel, batch: Batch) -> Comparison:
    """Refuse a model whose logits differ from its head applied to its backbone's output."""
    has_wider = model.has_classes or trained_copies(model.network)  # fp32 weights in addition to those of the base
    with evaluating(model), model.autocast(batch.ids.device) if has_wider else contextlib.nullcontext():
        if model.pooled:
            expected, logits = _pooled_logits(model, batch)
        else:
            lm, arguments = model.language_model, first_tokens(model, batch, _HEAD_TOKENS)
            expected, logits = lm(**arguments).logits[0].float(), model.head(lm.base_model(**arguments)[0][0]).float()
    error = float((expected - logits).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
    comparison = Comparison("logits of the separate head against the model's own logits", error, _HEAD_TOLERANCE)
    if math.isnan(error):
        raise EnvironmentProblem(
            "model.path: NaN in the model's logits for the first rows: its weights are damaged, or too large for "
            "precision=fp16. Set precision=bf16 or fp32, or download the model again."
        )
    return comparison.or_refuse(
        f"model.path: a model of kind {model.language_model.config.model_type} computes its logits in a way that "
        f"is not supported (relative difference {error:.1e}), so its loss would be wrong. "
        "Choose another model."
    )


def first_tokens(model: TrainingModel, batch: Batch, count: int) -> dict[str, Any]:
    """Return arguments of a pass over the first tokens of the first row."""
    arguments = {"input_ids": batch.ids[:1, :count], "use_cache": False}
    if model.attention == OWN:  # which computes its positions
        return arguments
    return {**arguments, "position_ids": batch.positions[:1, :count] + model.first_position}


def _pooled_logits(model: TrainingModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits of whole documents with the model's own pooling, and of the head on the states used in training."""
    lm = model.language_model
    expected, logits = [], []
    places = zip(batch.label_rows.tolist(), batch.starts, batch.lengths, strict=False)
    for at, start, length in list(places)[:_MAX_DOCUMENTS]:
        ids = batch.ids.flatten()[start : start + length][None]
        segments = (
            None if batch.token_type_ids is None else batch.token_type_ids.flatten()[start : start + length][None]
        )
        arguments = {"input_ids": ids, "use_cache": False, **model.segment_arguments(segments)}
        expected.append(lm(**arguments).logits[0])
        hidden = lm.base_model(**arguments)[0]
        logits.append(model.head(hidden[0, at - start][None])[0])  # alone, because several would round differently
    return torch.stack(expected).float(), torch.stack(logits).float()


def check_adapter(model: TrainingModel, config: AdapterConfig, batch: Batch) -> None:
    """Refuse an adapter on layers that training never calls, in any repeated layer or expert."""
    method, lm, device = adapter_of(config), model.language_model, batch.ids.device
    if method is None:
        return
    names, weights = zip(*model.trained().items(), strict=True)
    mode = lm.training
    lm.train()  # not `model`, which would add noise to embeddings
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])  # dropout
    with drawing, model.autocast(device), torch.enable_grad():
        states = lm.base_model(**first_tokens(model, batch, _HEAD_TOKENS))[0]
        gradients = torch.autograd.grad(states.float().sum(), weights, allow_unused=True)
    lm.train(mode)
    part, is_called = next(iter(method.moves_in.values())), dict[str, bool]()
    for name, gradient in zip(names, gradients, strict=True):
        if part in name:
            layer = without_numbers(without_peft(name).partition(part)[0])
            is_called[layer] = is_called.get(layer, False) or gradient is not None
    require_gradient([layer for layer, called in is_called.items() if not called])


@dataclass(frozen=True, slots=True)
class _Outcome:
    logits: Tensor  # [some tokens, vocabulary]
    gradient: Tensor  # of the embeddings [tokens, hidden]
    weights: Sequence[Tensor]  # gradients of some trained parameters


def _differences(outcome: _Outcome, expected: _Outcome) -> dict[str, float]:
    """Return the largest difference of logits, relative to the largest logit, and of gradients, relative to their
    norm.
    """
    logits, expected_logits = outcome.logits.float(), expected.logits.float()
    differences = [_by_norm([outcome.gradient], [expected.gradient])]
    if expected.weights:
        differences.append(_by_norm(outcome.weights, expected.weights))
    pairs = zip(outcome.weights, expected.weights, strict=True)
    missing = any(not a.any() and b.any() for a, b in pairs)  # rounding hides missing gradients of a few weights
    return {
        "logits": float((logits - expected_logits).abs().max() / expected_logits.abs().max()),
        "gradients": 1.0 if missing else max_or_nan(differences),
    }


def _by_norm(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    apart: Any = sum((a.double() - b.double()).square().sum() for a, b in zip(tensors, expected, strict=True))
    size: Any = sum(tensor.double().square().sum() for tensor in expected)
    return float((apart / size.clamp_min(torch.finfo(torch.float64).tiny)) ** 0.5)


def check_packing(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Refuse to train if packed or padded documents, as in `batch`, compute different results."""
    if len(batch.lengths) < 2:
        return []
    documents, is_packed = _documents_of(batch), len(batch.ids) == 1
    # layers of the model's own code save more for backward than the compiled layers of a step
    with evaluating(model), recomputing(model.network), model.autocast(batch.ids.device):
        separate = _separate(model, documents, "eager")
        layout: Callable[..., _Outcome] = _packed if is_packed else _padded
        together = partial(layout, model, documents, batch.documents)
        differences = _differences(together(), separate)
        allowed = _allowed_rounding(model, documents, separate)
        words = "packed" if is_packed else "padded"
        compared = {
            what: Comparison(f"{what} of {words} documents against separate documents", difference, allowed[what])
            for what, difference in differences.items()
        }
        wrong = next((what for what, comparison in compared.items() if not comparison.passed), None)
        by_attention = False
        if wrong is not None and model.attention != OWN:
            with _attention(model, register_kernel(plain_packed, f"{NAME}_plain")):
                plain = _differences(together(), separate)
            by_attention = all(plain[what] <= allowed[what] for what in plain)
    if wrong is not None:
        compared[wrong].or_refuse(
            _refusal(model, wrong, compared[wrong], is_packed=is_packed, by_attention=by_attention)
        )
    return list(compared.values())


def check_slices(model: TrainingModel, batch: Batch, runtime: Any) -> list[Comparison]:
    """Refuse a model whose states or gradients change if a row is sliced over the processes of `runtime.context`."""
    context, documents, limits = runtime.context, _documents_of(batch), batch.documents
    assert limits is not None
    lengths, ids = [len(document) for document in documents], torch.cat(documents)[None]
    packed = PackedSequences.from_lengths(lengths, limits.max_seqlen, len(limits.cu_seqlens) - 1).to(ids.device)
    places = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    no_labels = torch.zeros(1, dtype=torch.long, device=ids.device)
    size = ids.shape[1]
    whole = Batch(ids, places, no_labels, no_labels + IGNORE, tuple(lengths), 0, size, packed)
    part = context.part(whole, ids.device)
    with evaluating(model), recomputing(model.network), model.autocast(ids.device):
        first = context.index * part.ids.shape[1]
        ours = slice(first, first + part.num_tokens)
        tokens = torch.arange(part.num_tokens, device=ids.device)
        *states, weights = _pass(model, part.ids, tokens=tokens, **model.places(part.positions, part.documents, None))
        *expected, expected_weights = _pass(model, ids, **model.places(places, packed, None))
        allowed = _allowed_rounding(model, documents, _separate(model, documents, "eager"))["gradients"]
    for gradient in weights:
        context.sum_in_place(gradient)
    pairs = [([mine], [whole[ours]]) for mine, whole in zip(states, expected, strict=True)]
    pairs += [(weights, expected_weights)] if weights else []
    difference = runtime.host_group.max(max_or_nan(_by_norm(*pair) for pair in pairs))
    comparison = Comparison("states and gradients of a sliced row against the whole row", difference, allowed)
    return [
        comparison.or_refuse(
            f"parallel.context={context.size}: a model of kind {model.language_model.config.model_type} computes "
            f"different states or gradients for a sliced row (relative difference {comparison.difference:.1e}, allowed "
            f"{comparison.allowed:.1e}), so it would be trained wrongly. Set parallel.context=1."
        )
    ]


def check_causal(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Refuse a model whose own attention sees later tokens; this program's attention never does."""
    if model.attention != OWN or model.pooled or batch.documents is not None:
        return []
    lm, ids = model.language_model, max(_documents_of(batch), key=len)[None]
    half, embeddings = ids.shape[1] // 2, lm.get_input_embeddings()
    with (
        evaluating(model),
        model.autocast(ids.device),
        torch.enable_grad(),
        _embeddings_as_leaf(embeddings, 0) as leaves,
    ):
        states = lm.base_model(input_ids=ids, use_cache=False)[0][0, :half].float()
        weights = torch.cos(torch.arange(states.numel(), device=ids.device).view_as(states))
        (gradient, *_) = torch.autograd.grad((states * weights).sum(), leaves)
    gradient = gradient.flatten(0, -2)  # a row per token, whichever axis is first
    later = float(gradient[half:].abs().max() / gradient.abs().max())
    comparison = Comparison("influence of later tokens on hidden states", later, 0.0)
    return [
        comparison.or_refuse(
            f"model.path: in this model of kind {lm.config.model_type} tokens attend to later tokens, which they must "
            "predict, so it would learn to copy. Choose another model."
        )
    ]


def _refusal(model: TrainingModel, what: str, comparison: Comparison, *, is_packed: bool, by_attention: bool) -> str:
    """Return the error; `by_attention`: plain attention gives the right numbers, so the model type is not the cause."""
    kind = f"a model of kind {model.language_model.config.model_type}"
    numbers = f"relative difference {comparison.difference:.1e}, allowed {comparison.allowed:.1e}"
    text = f"computes different {what} for {'packed' if is_packed else 'padded'} documents ({numbers})"
    padded = "batching.packing=false" if is_packed else "model.path to another kind of model"
    if not by_attention:
        key = f"batching.packing={'true' if is_packed else 'false'}"
        return f"{key}: {kind} {text}, so it would be trained wrongly. Set {padded}."
    remedy = padded if model.attention == "sdpa" else "attention=sdpa"
    return (
        f"attention={model.attention}: it {text} and plain attention does not, so {kind} would be trained wrongly. "
        f"Set {remedy}."
    )


def _documents_of(batch: Batch) -> list[Tensor]:
    """Return the ends of all documents, which differ more than their beginnings, ordered by length."""
    ids, longest = batch.ids.flatten(), max(2, _MAX_PACKED_TOKENS // len(batch.lengths))
    bounds = ((start, start + length) for start, length in zip(batch.starts, batch.lengths, strict=True))
    ends = ((end, _PACKED_LENGTHS[bisect(_PACKED_LENGTHS, min(end - start, longest)) - 1]) for start, end in bounds)
    return sorted((ids[end - length : end] for end, length in ends), key=len)


def _packed(model: TrainingModel, documents: Sequence[Tensor], limits: PackedSequences) -> _Outcome:
    """Compute packed documents; `limits`: those of the run, which kernels get with every batch."""
    lengths, device = [len(d) for d in documents], documents[0].device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    packed = PackedSequences.from_lengths(lengths, limits.max_seqlen, len(limits.cu_seqlens) - 1)
    places = model.places(positions[None], packed.to(device), None)
    return _outcome(model, [_pass(model, torch.cat(list(documents))[None], **places)])


def _padded(model: TrainingModel, documents: Sequence[Tensor], isolated: PackedSequences | None) -> _Outcome:
    """Compute padded documents; `isolated`: not None if padding is separate from documents, as encoders need it."""
    ids, lengths = nn.utils.rnn.pad_sequence(list(documents), batch_first=True), [len(d) for d in documents]
    width = ids.shape[1]
    if isolated is not None:
        parts = [part for n in lengths for part in (n, width - n) if part]
        isolated = PackedSequences.from_lengths(parts).to(ids.device)
    places = model.places(torch.arange(width, device=ids.device).expand_as(ids), isolated, lengths)
    tokens = torch.cat([torch.arange(n, device=ids.device) + row * width for row, n in enumerate(lengths)])
    return _outcome(model, [_pass(model, ids, tokens=tokens, **places)])


def _separate(model: TrainingModel, documents: Sequence[Tensor], attention: str, noise: float = 0.0) -> _Outcome:
    """Compute each document in a separate row, with the model's own attention and positions."""
    with _attention(model, attention):
        rows = (torch.stack(list(group)) for _, group in groupby(documents, len))
        return _outcome(model, [_pass(model, ids, noise) for ids in rows])


@contextlib.contextmanager
def _attention(model: TrainingModel, name: str) -> Iterator[None]:
    lm: Any = model.language_model
    of_training = lm.config._attn_implementation
    lm.set_attn_implementation(name)
    try:
        yield
    finally:
        lm.set_attn_implementation(of_training)


def _pass(
    model: TrainingModel, ids: Tensor, noise: float = 0.0, tokens: Tensor | None = None, **places: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return states and embedding gradients, for all tokens or `tokens`, and gradients of watched parameters."""
    lm: Any = model.language_model
    tokens = torch.arange(ids.numel(), device=ids.device) if tokens is None else tokens
    watched = _watched_parameters(model)
    with torch.enable_grad(), _embeddings_as_leaf(lm.get_input_embeddings(), noise) as leaves:
        hidden = lm.base_model(input_ids=ids, use_cache=False, **places)[0].flatten(0, 1)[tokens]
        # weights that depend on token and dimension, not on the layout
        weights = torch.cos(ids.flatten()[tokens, None].float() + torch.arange(hidden.shape[-1], device=hidden.device))
        inputs = [*leaves, *watched]
        gradient, *others = torch.autograd.grad(
            (hidden.float() * weights).sum(), inputs, allow_unused=True, materialize_grads=True
        )
    return hidden.detach(), gradient.flatten(0, 1)[tokens], others


def _watched_parameters(model: TrainingModel) -> list[nn.Parameter]:
    """Return the trained parameters of the first layer of each kind; none for a sharded model with gathered layers."""
    if model.sharding is not None:
        return []
    layers = {tuple(name for name, _ in layer.named_parameters()): layer for layer in reversed(repeated_layers(model))}
    return [weight for layer in layers.values() for weight in layer.parameters() if weight.requires_grad]


@torch.no_grad()
def _outcome(model: TrainingModel, passes: Sequence[tuple[Tensor, Tensor, list[Tensor]]]) -> _Outcome:
    states, gradients, of_weights = zip(*passes, strict=True)
    hidden, gradient = torch.cat(states), torch.cat(gradients)
    weights = [torch.stack(parts).sum(0) for parts in zip(*of_weights, strict=True)]
    return _Outcome(model.head(hidden[:: -(-len(hidden) // _MAX_COMPARED_LOGITS)]), gradient, weights)


@contextlib.contextmanager
def _embeddings_as_leaf(embedding: nn.Module, noise: float) -> Iterator[list[Tensor]]:
    """Context that collects the embeddings of the next forward as graph leaves, with relative noise up to `noise`."""
    leaves: list[Tensor] = []

    def cut(_module: Any, _args: Any, out: Tensor) -> Tensor:
        leaf = out.detach()
        if noise:
            at = torch.arange(leaf.numel(), device=leaf.device).view_as(leaf)
            leaf = leaf * (1 + noise * torch.cos(at))
        leaves.append(leaf.to(out.dtype).requires_grad_())
        return leaves[-1].clone()  # some models change it in place

    handle = embedding.register_forward_hook(cut)
    try:
        yield leaves
    finally:
        handle.remove()


def _allowed_rounding(model: TrainingModel, documents: Sequence[Tensor], expected: _Outcome) -> dict[str, float]:
    """Return limits from the difference of the model's own two kernels, or from one rounding of its embeddings if it
    has one kernel.

    In float32 both are far below a constant, except for recurrent mixers, whose norms can amplify rounding.
    """
    lm, dtype = model.language_model, model.compute or expected.logits.dtype
    is_exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if is_exact and not recurrent_mixers(lm):
        return _PACKING_FP32
    kernel, eps = own_attention(lm), torch.finfo(dtype).eps
    noise = eps / 2 if kernel == "eager" or is_exact else 0.0
    rounding = _differences(_separate(model, documents, kernel, noise), expected)
    least = _PACKING_FP32 if is_exact else dict.fromkeys(rounding, eps)
    return {what: max(_PACKING_FACTOR * rounding[what], least[what]) for what in rounding}


# ---- loss comparison


_LOSS_ROWS = 48
_LOSS_CHUNK = 20  # rows, so that sums over chunks are compared too
_LARGE_LOGIT = 30.0  # large enough to show soft-capping
_LOSS_FP32 = 1e-5
_LOSS_ROUNDINGS = 8  # roundings of the compute dtype
_TF32_EPS = 2.0**-10
_LOSS = "loss and gradients of a linear head against the model's own head"


def compare_loss_head(model: TrainingModel, head: LinearHead, batch: Batch) -> Comparison:
    """Compare loss and gradients of a linear head with those of the model's own head."""
    weighted = batch.weights is not None
    with evaluating(model), torch.no_grad(), model.autocast(batch.ids.device):
        rows: Tensor = model.language_model.base_model(**first_tokens(model, batch, _LOSS_ROWS))[0][0]
    faults = Exception if uses_kernels(rows.device) else ()  # any compiler error of a kernel
    return attempt(lambda: _compare_losses(model, head, rows, weighted=weighted), faults)


def _compare_losses(model: TrainingModel, head: LinearHead, rows: Tensor, *, weighted: bool) -> Comparison:
    with model.autocast(rows.device):
        with torch.no_grad():
            largest = model.head(rows).float().abs().max().clamp_min(1e-6)
        difference = max_or_nan(
            _loss_difference(model, head, states.to(rows.dtype), weighted=weighted)
            for states in (rows, rows.float() * (_LARGE_LOGIT / largest))
        )
        dtype = autocast_dtype(rows)
    if dtype != torch.float32:
        allowed = _LOSS_ROUNDINGS * torch.finfo(dtype).eps
    elif rows.is_cuda and torch.get_float32_matmul_precision() != "highest":
        allowed = _LOSS_ROUNDINGS * _TF32_EPS
    else:
        allowed = _LOSS_FP32
    return Comparison(_LOSS, difference, allowed)


def _loss_difference(model: TrainingModel, head: LinearHead, rows: Tensor, *, weighted: bool) -> float:
    at = torch.arange(len(rows), device=rows.device)
    targets = (at * 7919) % head.layer.out_features
    targets[3::11] = IGNORE
    weights = 1 + torch.sin(at.float()) / 2 if weighted else None
    trained = head_parameters(model.language_model)

    def outcome(loss_sum: Any) -> list[Tensor]:
        leaf = rows.detach().requires_grad_()
        with torch.enable_grad():
            loss = loss_sum(leaf)
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, *trained])]

    linear = outcome(lambda leaf: replace(head, chunk=_LOSS_CHUNK).loss_sum(leaf, targets, weights))
    expected = outcome(lambda leaf: token_loss_sum(model.head, leaf, targets, trained, _LOSS_CHUNK, weights))
    return max_difference(linear, expected)
