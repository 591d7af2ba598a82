"""Verification of compiled layers before the first step, one layer at a time.

At the real input of each layer, the compiled layer and the layer's own forward are compared with a float32 reference on
some documents. How far a compiled layer may be from it depends on how far the own forward is, so the limits hold for
every precision, depth and quantization. Memory is that of one layer at the shape of a micro-batch.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from app.batch import Batch, PackedSequences
from app.errors import gist
from app.layers.activation_checkpointing import draws_random_numbers
from app.layers.attention import NAME, register_kernel
from app.layers.attention.sdpa import plain_packed
from app.layers.comparison import Comparison, Fault
from app.layers.compile import CompiledLayers, LayerCall
from app.layers.frozen_linear import without_row_rounding
from app.model.training_model import TrainingModel
from app.oom_retry import is_out_of_memory

_COMPARED_TOKENS = 512
_MIN_ERROR = 1e-5  # of float32 arithmetic: smaller errors count as this one
_NOISE = 1.0  # an error as large as the tensor: rounding is all there is, as in the gradient of a key's bias
_MAX_WORST, _MAX_MEAN = 2.0, 1.5  # allowed error of a compiled layer by that of its own forward


class TensorError(NamedTuple):
    """Relative errors of one tensor of one layer: of the compiled layer and of its own forward."""

    layer: int
    name: str
    compiled: float
    own: float

    @property
    def ratio(self) -> float:
        """The compiled error by the own one; NaN where the compiled tensor is not finite."""
        if not math.isfinite(self.compiled):
            return math.nan
        return 0.0 if self.own >= _NOISE else self.compiled / max(self.own, _MIN_ERROR)


@dataclass(frozen=True, slots=True)
class ComparedDocuments:
    """Some documents of a packed batch, as a batch of their own, and the places of their tokens in its row."""

    batch: Batch
    places: Tensor  # [T]

    @classmethod
    def of(cls, batch: Batch, *, causal: bool) -> "ComparedDocuments":
        """Take the first, the last and others in turn; causal documents may be cut at their end."""
        documents = batch.documents
        assert documents is not None, "layers are compiled for packed batches"
        lengths, taken = documents.lengths, dict[int, int]()
        for at in _outside_in(len(lengths)):
            free = _COMPARED_TOKENS - sum(taken.values())
            if free <= 0:
                break
            taken[at] = min(lengths[at], max(free // 2, 1)) if causal else lengths[at]
        starts = documents.cu_seqlens.tolist()
        places = torch.cat([torch.arange(starts[at], starts[at] + taken[at]) for at in sorted(taken)])
        places = places.to(batch.ids.device)
        counts = [taken[at] for at in sorted(taken)]
        few = PackedSequences.from_lengths(counts, documents.max_seqlen, len(documents.cu_seqlens) - 1)
        segments = batch.token_type_ids
        part = replace(
            batch,
            ids=batch.ids[:, places],
            positions=batch.positions[:, places],
            documents=few.to(batch.ids.device),
            lengths=tuple(counts),
            token_type_ids=None if segments is None else segments[:, places],
        )
        return cls(part, places)


def _outside_in(count: int) -> Iterator[int]:
    """Yield the first, the last, the second, ... index below `count`."""
    for at in range(count):
        yield at // 2 if at % 2 == 0 else count - 1 - at // 2


def verify_compiled(model: TrainingModel, layers: CompiledLayers, batch: Batch) -> Comparison:
    """Compile all layers for the shape of `batch` and compare each with its own forward and a float32 reference.

    Dropout is off meanwhile, as compiled layers draw other masks; then the graphs of training are made apart.
    """
    began, device, lm = time.perf_counter(), batch.ids.device, model.language_model
    compared = ComparedDocuments.of(batch, causal=_is_causal(lm))
    verifier = _Verifier(model, layers, compared)
    has_dropout, mode = draws_random_numbers(lm), lm.training
    random_state = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random_state, model.autocast(device):
        lm.train(mode and not has_dropout)
        try:
            # with gradients before the first layer: whether a layer's input needs one is a part of its graph
            with layers.visited(verifier.record), torch.enable_grad():
                model.hidden_states(compared.batch)
            with layers.visited(verifier.compare), torch.no_grad():
                model.hidden_states(batch)
        finally:
            lm.train(mode)
        if has_dropout:
            layers.graphs = 0
            with layers.visited(verifier.make_graph), torch.no_grad():
                model.hidden_states(batch)
    found = verifier.result()
    layers.seconds += time.perf_counter() - began
    layers.verified, layers.worst_ratio, layers.errors = True, found.difference, verifier.errors
    return found


def _is_causal(lm: nn.Module) -> bool:
    """Return whether no token of any layer attends to those after it."""
    return all(getattr(module, "is_causal", True) for module in lm.modules())


class _Verifier:
    """The visits to each layer: `record` its arguments for a few documents, then `compare` it in the whole batch."""

    def __init__(self, model: TrainingModel, layers: CompiledLayers, compared: ComparedDocuments) -> None:
        self._model, self._layers, self._places = model, layers, compared.places
        self._recorded: dict[int, tuple[LayerCall, bool]] = {}
        self._needs_gradient = False  # of the next layer's input
        self.errors: list[TensorError] = []
        self._fault: str | None = None

    def record(self, number: int, layer: nn.Module, own: Callable[..., Any], call: LayerCall) -> Any:
        """Keep the arguments but for hidden states, and whether those get a gradient in training."""
        self._needs_gradient |= call.hidden.requires_grad
        self._recorded[number] = (call.with_hidden(None), self._needs_gradient)
        self._needs_gradient |= any(parameter.requires_grad for parameter in layer.parameters())
        with torch.no_grad():
            return own(*call.args, **call.kwargs)

    def compare(self, number: int, layer: nn.Module, own: Callable[..., Any], call: LayerCall) -> Any:
        """Compare one layer. After a fault the pass continues without, as other processes wait for its collectives."""
        self._attempt(number, lambda: self.errors.extend(self._errors_of(number, layer, own, call)))
        return own(*call.args, **call.kwargs)

    def make_graph(self, number: int, layer: nn.Module, own: Callable[..., Any], call: LayerCall) -> Any:
        """Compile one layer without a comparison."""
        few, needs_gradient = self._recorded[number]
        trained = [each for each in layer.parameters() if each.requires_grad]
        compiled, call = partial(self._layers.compiled, layer), _like(call, few)
        make = partial(_outcome, upstream=torch.ones_like, needs_gradient=needs_gradient)
        self._attempt(number, lambda: make(compiled, call, call.hidden, trained))
        return own(*call.args, **call.kwargs)

    def _attempt(self, number: int, work: Callable[[], Any]) -> None:
        if self._fault is not None:
            return
        try:
            work()
        except Exception as fault:  # of any stage of the compiler, and of what it made
            if is_out_of_memory(fault):
                raise
            self._fault = f"layer {number} cannot be compiled ({gist(fault)})"

    def _errors_of(self, number: int, layer: nn.Module, own: Callable[..., Any], call: LayerCall) -> list[TensorError]:
        few, needs_gradient = self._recorded[number]
        trained = {name: each for name, each in layer.named_parameters() if each.requires_grad}
        whole = call.hidden.detach()
        axis = whole.ndim - 2  # of tokens
        picks = partial(torch.index_select, dim=axis, index=self._places)
        rows = picks(whole)

        def spread(values: Tensor, like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=values.dtype).index_copy_(axis, self._places, values)

        weights = _fixed_values(rows)

        def upstream(output: Tensor) -> Tensor:
            return (weights if output.shape == weights.shape else spread(weights, output)).to(output.dtype)

        outcome = partial(_outcome, upstream=upstream, needs_gradient=needs_gradient)
        with _nonzero(trained.values()):
            compiled = outcome(partial(self._layers.compiled, layer), _like(call, few), whole, [*trained.values()])
            theirs = outcome(own, few, rows, [*trained.values()])
            with float32_reference(self._model.language_model, layer, own) as (forward, parameters):
                exact = outcome(forward, _widened(few), rows.float(), [parameters[name] for name in trained])
        compiled[0] = picks(compiled[0])
        if needs_gradient:  # all rows of it: none but those of the compared documents may have a gradient
            theirs[1], exact[1] = (spread(side[1], whole) for side in (theirs, exact))
        names = ["output", *["gradient of input"] * needs_gradient, *(f"gradient of {name}" for name in trained)]
        ours, own_errors = (_relative_errors(side, exact) for side in (compiled, theirs))
        return [TensorError(number, *each) for each in zip(names, ours, own_errors, strict=True)]

    def result(self) -> Comparison:
        """The largest ratio of errors, or the fault that was found."""
        words = "error of compiled layers relative to uncompiled layers"
        if self._fault is not None:
            return Fault(self._fault, math.nan, 0.0)
        if not self.errors:  # no layer can be compiled
            return Comparison(words, 0.0, _MAX_WORST)
        worst = max(self.errors, key=lambda each: math.inf if math.isnan(each.ratio) else each.ratio)
        if not worst.ratio <= _MAX_WORST:
            return _refusal(f"layer {worst.layer}", worst, _MAX_WORST)
        mean = max(mean_errors(self.errors), key=lambda each: each.ratio)
        if not mean.ratio <= _MAX_MEAN:
            return _refusal("mean over layers", mean, _MAX_MEAN)
        return Comparison(words, worst.ratio, _MAX_WORST)


def mean_errors(errors: Iterable[TensorError]) -> list[TensorError]:
    """Return the mean errors over all layers of each kind of tensor."""
    by_name = defaultdict[str, list[TensorError]](list)
    for each in errors:
        by_name[each.name].append(each)
    return [
        TensorError(-1, name, *(sum(values) / len(same) for values in zip(*(each[2:] for each in same), strict=True)))
        for name, same in by_name.items()
    ]


def _refusal(place: str, found: TensorError, limit: float) -> Fault:
    name = found.name.replace(".default", "").removesuffix(".weight")
    text = (
        f"{place}, {name}: error {found.compiled:.1e} is {found.ratio:.3g}x that of the uncompiled layer "
        f"({max(found.own, _MIN_ERROR):.1e}, limit {limit:g}x)"
    )
    return Fault(text, found.ratio, limit)


def _outcome(
    forward: Callable[..., Any],
    call: LayerCall,
    hidden: Tensor,
    trained: Sequence[Tensor],
    *,
    upstream: Callable[[Tensor], Tensor],
    needs_gradient: bool,
) -> list[Tensor]:
    """Return the output and the gradients of the input, if it needs one, and of trained parameters."""
    leaf = hidden.detach().requires_grad_(needs_gradient)
    args, kwargs = call.with_hidden(leaf)
    with torch.enable_grad():
        output = forward(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    inputs = [*[leaf] * needs_gradient, *trained]
    if not inputs:
        return [output.detach()]
    gradients = torch.autograd.grad(output, inputs, upstream(output), allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradients]


def _relative_errors(found: Iterable[Tensor], exact: Iterable[Tensor]) -> list[float]:
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    pairs = zip(found, exact, strict=True)
    errors = [norm(ours.float() - theirs) / norm(theirs).clamp_min(1e-30) for ours, theirs in pairs]
    numbers: list[float] = torch.stack(errors).tolist()
    return numbers


def _fixed_values(like: Tensor) -> Tensor:
    """Return normal random numbers that are always the same: those of the run must not depend on verification.

    Values of low rank, such as cosines, would leave few numbers in a gradient: errors of correct layers differ more.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device)


@contextmanager
def _nonzero(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which parameters that are all zero have values: the B of a new adapter hides errors of the rest."""
    hidden = [each for each in trained if not each.detach().any()]
    with torch.no_grad():
        for each in hidden:
            each.copy_(_fixed_values(each) / each.shape[-1] ** 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for each in hidden:
                each.zero_()


class _OwnForward(nn.Module):
    """The own forward of a layer as a module, without the hooks that calling the layer would run."""

    def __init__(self, layer: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.own = layer, own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)


@contextmanager
def float32_reference(
    lm: Any, layer: nn.Module, own: Callable[..., Any]
) -> Iterator[tuple[Callable[..., Any], Mapping[str, Tensor]]]:
    """Context that gives a layer's forward in float32 and its parameters there: plain attention, rows that are not
    rounded, weights dequantized to float32.
    """
    parameters = {
        name: each.detach().float().requires_grad_(each.requires_grad)
        for name, each in layer.named_parameters()
        if each.is_floating_point()
    }
    values = {f"layer.{name}": each for name, each in parameters.items()}
    wrapped = _OwnForward(layer, own)
    of_training, matmul = lm.config._attn_implementation, torch.get_float32_matmul_precision()
    packed = [each for each in layer.modules() if hasattr(each, "compute_dtype")]  # layers of bitsandbytes
    dtypes = [each.compute_dtype for each in packed]
    lm.set_attn_implementation(register_kernel(plain_packed, f"{NAME}_plain"))
    torch.set_float32_matmul_precision("highest")
    for each in packed:
        each.compute_dtype = torch.float32  # type: ignore[assignment]
    try:
        device = next(iter(parameters.values())).device.type
        with without_row_rounding(layer), torch.autocast(device, enabled=False):
            yield lambda *args, **kwargs: torch.func.functional_call(wrapped, values, args, kwargs), parameters
    finally:
        torch.set_float32_matmul_precision(matmul)
        lm.set_attn_implementation(of_training)
        for each, dtype in zip(packed, dtypes, strict=True):
            each.compute_dtype = dtype


def _like(call: LayerCall, recorded: LayerCall) -> LayerCall:
    """Return the call with gradients needed of the same other tensors as in training."""

    def mark(value: Any, model: Any) -> Any:
        return value.detach().requires_grad_() if isinstance(model, Tensor) and model.requires_grad else value

    return LayerCall(*tree_map(mark, tuple(call), tuple(recorded)))


def _widened(call: LayerCall) -> LayerCall:
    """Return the call with its tensors of numbers in float32."""

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return LayerCall(*tree_map(widen, tuple(call)))
