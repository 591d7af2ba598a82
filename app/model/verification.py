"""Verification of compiled layers before the first step, one layer at a time.

At the real input of each layer, the compiled and the uncompiled layer are compared with a float32 reference on some
documents. The limit for the compiled error is a multiple of the uncompiled error, so it is valid for every precision,
depth and quantization. It takes the memory of one layer at the shape of a micro-batch.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from app.layers.tiled_mlp import own_forward, tiling_of
from app.model.training_model import TrainingModel
from app.oom_retry import is_out_of_memory

_COMPARED_TOKENS = 512
_MIN_ERROR = 1e-5  # float32 rounding: smaller errors count as this one
_NOISE = 1.0  # an error as large as the tensor: it has only rounding, as the gradient of a key's bias
_MAX_WORST, _MAX_MEAN = 2.0, 1.5  # allowed compiled error, as a multiple of the uncompiled error


class TensorError(NamedTuple):
    """Relative errors of one tensor of one layer: compiled and uncompiled."""

    layer: int
    name: str
    compiled: float
    uncompiled: float

    @property
    def ratio(self) -> float:
        """Compiled error divided by the uncompiled error; NaN if the compiled tensor is not finite."""
        if not math.isfinite(self.compiled):
            return math.nan
        return 0.0 if self.uncompiled >= _NOISE else self.compiled / max(self.uncompiled, _MIN_ERROR)


@dataclass(frozen=True, slots=True)
class ComparedDocuments:
    """Some documents of a packed batch as a separate batch, and the positions of their tokens in its row."""

    batch: Batch
    places: Tensor  # [T]

    @classmethod
    def of(cls, batch: Batch, *, causal: bool) -> "ComparedDocuments":
        """Take the first, the last, the second and so on; causal documents may be truncated."""
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
    """Compile all layers for the shape of `batch` and compare them with the uncompiled layers and a float32 reference.

    Dropout is off during the comparison, because compiled layers draw other masks; then training graphs are compiled
    separately.
    """
    start, device, lm = time.perf_counter(), batch.ids.device, model.language_model
    compared = ComparedDocuments.of(batch, causal=_is_causal(lm))
    verifier = _Verifier(model, layers, compared)
    has_dropout, mode = draws_random_numbers(lm), lm.training
    random_state = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random_state, model.autocast(device):
        lm.train(mode and not has_dropout)
        try:
            # with gradients before the first layer: whether a layer's input needs one is part of its graph
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
    result = verifier.result()
    layers.seconds += time.perf_counter() - start
    layers.verified, layers.worst_ratio, layers.errors = True, result.difference, verifier.errors
    return result


def _is_causal(lm: nn.Module) -> bool:
    """Return whether no layer attends to later tokens."""
    return all(getattr(module, "is_causal", True) for module in lm.modules())


class _Verifier:
    """Visits to all layers: `record` arguments for a few documents, then `compare` in the whole batch."""

    def __init__(self, model: TrainingModel, layers: CompiledLayers, compared: ComparedDocuments) -> None:
        self._model, self._layers, self._places = model, layers, compared.places
        self._recorded: dict[int, tuple[LayerCall, bool]] = {}
        self._needs_gradient = False  # of the next layer's input
        self.errors: list[TensorError] = []
        self._fault: str | None = None

    def record(self, number: int, layer: nn.Module, forward: Callable[..., Any], call: LayerCall) -> Any:
        """Store the arguments except hidden states, and whether these get a gradient in training."""
        self._needs_gradient |= call.hidden.requires_grad
        self._recorded[number] = (call.with_hidden(None), self._needs_gradient)
        self._needs_gradient |= any(parameter.requires_grad for parameter in layer.parameters())
        with torch.no_grad():
            return forward(*call.args, **call.kwargs)

    def compare(self, number: int, layer: nn.Module, forward: Callable[..., Any], call: LayerCall) -> Any:
        """Compare one layer. After a fault only complete the pass, because other processes wait for its collectives."""
        self._attempt(number, lambda: self.errors.extend(self._errors_of(number, layer, forward, call)))
        return forward(*call.args, **call.kwargs)

    def make_graph(self, number: int, layer: nn.Module, forward: Callable[..., Any], call: LayerCall) -> Any:
        """Compile one layer without a comparison."""
        few, needs_gradient = self._recorded[number]
        trained = [weight for weight in layer.parameters() if weight.requires_grad]
        compiled, call = partial(self._layers.compiled, layer), _like(call, few)
        make = partial(_outcome, upstream=torch.ones_like, needs_gradient=needs_gradient)
        self._attempt(number, lambda: make(compiled, call, call.hidden, trained))
        return forward(*call.args, **call.kwargs)

    def _attempt(self, number: int, work: Callable[[], Any]) -> None:
        if self._fault is not None:
            return
        try:
            work()
        except Exception as fault:  # from any stage of the compiler, or from its output
            if is_out_of_memory(fault):
                raise
            self._fault = f"layer {number} cannot be compiled ({gist(fault)})"

    def _errors_of(
        self, number: int, layer: nn.Module, forward: Callable[..., Any], call: LayerCall
    ) -> list[TensorError]:
        few, needs_gradient = self._recorded[number]
        trained = {name: weight for name, weight in layer.named_parameters() if weight.requires_grad}
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
            uncompiled = outcome(forward, few, rows, [*trained.values()])
            with float32_reference(self._model.language_model, layer, forward) as (reference, parameters):
                exact = outcome(reference, _widened(few), rows.float(), [parameters[name] for name in trained])
        compiled[0] = picks(compiled[0])
        if needs_gradient:  # for all rows: only those of compared documents may have a gradient
            uncompiled[1], exact[1] = (spread(side[1], whole) for side in (uncompiled, exact))
        names = ["output", *["gradient of input"] * needs_gradient, *(f"gradient of {name}" for name in trained)]
        errors = (_relative_errors(side, exact) for side in (compiled, uncompiled))
        return [TensorError(number, *values) for values in zip(names, *errors, strict=True)]

    def result(self) -> Comparison:
        """Return the largest ratio of errors, or the fault."""
        words = "error of compiled layers relative to uncompiled layers"
        if self._fault is not None:
            return Fault(self._fault, math.nan, 0.0)
        if not self.errors:  # no layer can be compiled
            return Comparison(words, 0.0, _MAX_WORST)
        worst = max(self.errors, key=lambda error: math.inf if math.isnan(error.ratio) else error.ratio)
        if not worst.ratio <= _MAX_WORST:
            return _refusal(f"layer {worst.layer}", worst, _MAX_WORST)
        mean = max(mean_errors(self.errors), key=lambda error: error.ratio)
        if not mean.ratio <= _MAX_MEAN:
            return _refusal("mean over layers", mean, _MAX_MEAN)
        return Comparison(words, worst.ratio, _MAX_WORST)


def mean_errors(errors: Iterable[TensorError]) -> list[TensorError]:
    """Return the mean errors over all layers, by tensor name."""
    by_name = defaultdict[str, list[TensorError]](list)
    for error in errors:
        by_name[error.name].append(error)
    return [
        TensorError(-1, name, *(sum(values) / len(same) for values in zip(*(error[2:] for error in same), strict=True)))
        for name, same in by_name.items()
    ]


def _refusal(place: str, error: TensorError, limit: float) -> Fault:
    name = error.name.replace(".default", "").removesuffix(".weight")
    text = (
        f"{place}, {name}: error {error.compiled:.1e} is {error.ratio:.3g}x that of the uncompiled layer "
        f"({max(error.uncompiled, _MIN_ERROR):.1e}, limit {limit:g}x)"
    )
    return Fault(text, error.ratio, limit)


def _outcome(
    forward: Callable[..., Any],
    call: LayerCall,
    hidden: Tensor,
    trained: Sequence[Tensor],
    *,
    upstream: Callable[[Tensor], Tensor],
    needs_gradient: bool,
) -> list[Tensor]:
    """Return the output and the gradients of trained parameters and, if needed, of the input."""
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


def _relative_errors(tensors: Iterable[Tensor], exact: Iterable[Tensor]) -> list[float]:
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    pairs = zip(tensors, exact, strict=True)
    errors = [norm(tensor.float() - expected) / norm(expected).clamp_min(1e-30) for tensor, expected in pairs]
    numbers: list[float] = torch.stack(errors).tolist()
    return numbers


def _fixed_values(like: Tensor) -> Tensor:
    """Return constant normal random numbers: those of the run must not depend on verification.

    Low-rank values, such as cosines, would leave few numbers in a gradient, so errors of correct layers would vary.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device)


@contextmanager
def _nonzero(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which all-zero parameters have values: B of a new adapter would hide errors of other tensors."""
    zeros = [parameter for parameter in trained if not parameter.detach().any()]
    with torch.no_grad():
        for parameter in zeros:
            parameter.copy_(_fixed_values(parameter) / parameter.shape[-1] ** 0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


class _OwnForward(nn.Module):
    """A layer's own forward as a module, without the hooks of the layer."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@contextmanager
def float32_reference(
    lm: Any, layer: nn.Module, forward: Callable[..., Any]
) -> Iterator[tuple[Callable[..., Any], Mapping[str, Tensor]]]:
    """Context with a layer's forward and parameters in float32: plain attention, no row rounding, no tiles (parameters
    are replaced in the forward pass only), weights dequantized to float32.
    """
    parameters = {
        name: weight.detach().float().requires_grad_(weight.requires_grad)
        for name, weight in layer.named_parameters()
        if weight.is_floating_point()
    }
    values = {f"layer.{name}": weight for name, weight in parameters.items()}
    wrapped = _OwnForward(layer, forward)
    of_training, matmul = lm.config._attn_implementation, torch.get_float32_matmul_precision()
    packed = [module for module in layer.modules() if hasattr(module, "compute_dtype")]  # bitsandbytes layers
    dtypes = [module.compute_dtype for module in packed]
    lm.set_attn_implementation(register_kernel(plain_packed, f"{NAME}_plain"))
    torch.set_float32_matmul_precision("highest")
    for module in packed:
        module.compute_dtype = torch.float32  # type: ignore[assignment]
    tiling = tiling_of(layer)
    untiled = nullcontext() if tiling is None else tiling.computed_by(own_forward)
    try:
        device = next(iter(parameters.values())).device.type
        with untiled, without_row_rounding(layer), torch.autocast(device, enabled=False):
            yield lambda *args, **kwargs: torch.func.functional_call(wrapped, values, args, kwargs), parameters
    finally:
        torch.set_float32_matmul_precision(matmul)
        lm.set_attn_implementation(of_training)
        for module, dtype in zip(packed, dtypes, strict=True):
            module.compute_dtype = dtype


def _like(call: LayerCall, recorded: LayerCall) -> LayerCall:
    """Return the call with gradients required for the same other tensors as in training."""

    def mark(value: Any, model: Any) -> Any:
        return value.detach().requires_grad_() if isinstance(model, Tensor) and model.requires_grad else value

    return LayerCall(*tree_map(mark, tuple(call), tuple(recorded)))


def _widened(call: LayerCall) -> LayerCall:
    """Return the call with floating-point tensors in float32."""

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return LayerCall(*tree_map(widen, tuple(call)))
