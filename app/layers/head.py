"""The LM head, and its cross-entropy over labeled rows in chunks: only one chunk of logits exists at a time.

The head is called through the model's own forward, with the backbone replaced by its hidden states, so that everything
around the head (soft-capping, scaling, a transform, a pooler) is included.

For a hidden state h with target t and weight w, and a linear head with the weight W [vocabulary, hidden]:

    z = W h        loss = w (logsumexp(z) - z[t])        dloss/dz = w (softmax(z) - onehot(t))
    dloss/dh = W^T dloss/dz        dloss/dW = sum over rows of (dloss/dz) h^T

The gradient of z needs only z, so it is computed in the forward pass: the logits of a chunk become their own gradient
in place, their products with W and h are stored, and the next chunk reuses the buffer. The loss is a sum, so the
backward pass only multiplies the stored gradients by the gradient of that sum. 128,256 logits of 16,384 tokens would
take 8.4 GB in float32, and autograd would store three copies.

Any other head goes through the model's own forward (`own_head`), with gradients by autograd, chunk by chunk. A dispatch
mode detects a linear head, and `build.choose_loss_head` compares it with the model's own before step 1.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from app.batch import IGNORE
from app.layers.operations import autocast_dtype, loss_and_grad_inplace

Head = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, vocabulary]


def own_head(lm: Any) -> Head:
    """Return the head as a function of hidden states."""
    prefix: str = lm.base_model_prefix

    def head(rows: Tensor) -> Tensor:
        attributes = vars(lm.base_model).items()
        numbers = {name: value for name, value in attributes if isinstance(value, int | float)}
        stub = BackboneStub(rows[None], numbers=numbers)
        ids = torch.empty(1, len(rows), dtype=torch.long, device=rows.device)  # some kinds read the shape
        lm.__dict__[prefix] = stub  # setattr refuses a non-module; an instance attribute hides the module
        try:
            logits: Tensor = lm(input_ids=ids, use_cache=False).logits
        finally:
            del lm.__dict__[prefix]
        return logits[0]

    return head


class BackboneStub:
    """Stub of the backbone and its output: hidden states, the backbone's numbers, None for everything else.

    Some kinds read what others lack: router logits, cross attentions, a decoder inside the backbone, a multiplier.
    """

    def __init__(
        self, hidden: Tensor, pooled: Tensor | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        vars(self).update(numbers or {})
        self.last_hidden_state = hidden
        self._parts = (hidden,) if pooled is None else (hidden, pooled)

    @property
    def decoder(self) -> "BackboneStub":
        """The stub itself: an attribute would be a reference cycle that holds the rows until the next collection."""
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> "BackboneStub":
        return self

    def __getitem__(self, index: int) -> Tensor:
        return self._parts[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def in_backbone(lm: Any, name: str) -> bool:
    """Return whether a module or weight belongs to the backbone; a pooler inside the backbone belongs to the head."""
    inside = f"{lm.base_model_prefix}."
    return name.startswith(inside) and not f"{name}.".startswith(f"{inside}pooler.")


def head_parameters(lm: Any) -> list[nn.Parameter]:
    """Return the trained parameters of the head without duplicates, including those tied to the embedding."""
    named = lm.named_parameters(remove_duplicate=False)
    outside = {id(p): p for name, p in named if not in_backbone(lm, name) and p.requires_grad}
    return list(outside.values())


def pooled_head(lm: Any) -> Head:
    """Return the head as a function of pooled states, each a document of one token."""
    prefix: str = lm.base_model_prefix
    config = lm.config.get_text_config()

    def head(rows: Tensor) -> Tensor:
        states = rows[:, None]
        pooler = getattr(lm.base_model, "pooler", None)
        activation = getattr(lm.base_model, "pooler_activation", None)  # next to a pooler of one layer
        pooled = None if pooler is None else pooler(states) if activation is None else activation(pooler(rows))
        stub = BackboneStub(states, pooled)
        padding = config.pad_token_id
        lm.__dict__[prefix] = stub  # as above
        config.pad_token_id = 0 if padding is None else padding  # without one, kinds refuse several documents
        try:
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=rows.device)
            logits: Tensor = lm(input_ids=ids).logits
        finally:
            del lm.__dict__[prefix]
            config.pad_token_id = padding
        return logits

    return head


def head_modules(lm: nn.Module) -> list[str]:
    """Return the names of the head modules: all except the backbone, and a pooler inside it."""
    names = [name for name, module in lm.named_children() if _has_weights(module)]
    inside = f"{lm.base_model_prefix}.pooler"
    pooler = [name for name, module in lm.named_modules() if name == inside and _has_weights(module)]
    return [name for name in names if name != lm.base_model_prefix] + pooler


def keep_head_in_fp32(lm: nn.Module) -> None:
    """Cast the head to fp32 in place, with any backbone dtype: it is always trained."""
    for name in head_modules(lm):
        lm.get_submodule(name).float()


def takes_segments(lm: Any) -> bool:
    """Return whether the backbone takes token types, which mark the two texts of a pair."""
    return "token_type_ids" in inspect.signature(lm.base_model.forward).parameters


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# ---- chunked loss


_MIN_ROWS = 512  # smaller chunks were up to 3.5 times slower than one piece
_MAX_CHUNK_BYTES = 256 << 20
_LOGIT_COPIES = 3  # in float32: logits, softmax, gradient
_MAX_LINEAR_CHUNK_BYTES = 512 << 20  # of logits
_MAX_ROWS = 4096
_VECTOR = 64  # rows are padded to a multiple, so that kernels load several numbers at once with an odd vocabulary size

# operations that a linear head may use besides one product with its weight
_FREE = frozenset({"empty", "view", "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "t", "detach", "alias"})
_PRODUCTS = frozenset({"mm", "addmm"})


def chunk_rows(vocabulary: int) -> int:
    """Return the number of rows per chunk of a head."""
    return max(_MIN_ROWS, _MAX_CHUNK_BYTES // (_LOGIT_COPIES * 4 * vocabulary))


def token_loss_sum(
    head: Head, rows: Tensor, targets: Tensor, parameters: list[nn.Parameter], chunk: int, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of weighted cross-entropies over all targets except IGNORE, in float32."""
    with for_trained_head(rows, parameters) as inputs:
        loss: Tensor = _ChunkedLoss.apply(head, chunk, targets, weights, inputs, *parameters)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_scores(
    head: Head, rows: Tensor, targets: Tensor, parameters: list[nn.Parameter], chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each target in float32, 0 for IGNORE, and the token of the largest logit."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=rows.device)
    chosen = torch.empty(targets.shape, dtype=torch.long, device=rows.device)
    with for_trained_head(rows, parameters) as inputs:
        for start in range(0, inputs.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = head(inputs[part]).float()
            losses[part] = F.cross_entropy(logits, targets[part], ignore_index=IGNORE, reduction="none")
            chosen[part] = logits.argmax(-1)
            del logits  # else two chunks would exist while the next is computed
    return losses, chosen


@contextlib.contextmanager
def for_trained_head(rows: Tensor, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Yield float32 rows without autocast if a trained head's gradient, a sum over rows, could overflow float16."""
    device = rows.device.type
    if parameters and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        with torch.autocast(device, enabled=False):
            yield rows.float()
    else:
        yield rows


def _summed(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return (F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") * weights).sum()


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, chunk: int, targets: Tensor, weights: Tensor | None, rows: Tensor, *parameters: Tensor
    ) -> Tensor:
        wants = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        row_gradient = torch.empty_like(rows) if wants else None
        gradients = [torch.zeros_like(p) for p in parameters] if wants else []
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            piece = rows[part].detach().requires_grad_(wants)
            with torch.set_grad_enabled(wants):
                loss = _summed(head(piece).float(), targets[part], None if weights is None else weights[part])
            total += loss.detach()
            if row_gradient is not None:
                chunk_gradients = torch.autograd.grad(loss, [piece, *parameters])
                row_gradient[part] = chunk_gradients[0]
                for gradient, new in zip(gradients, chunk_gradients[1:], strict=True):
                    gradient.add_(new)
        if row_gradient is not None:
            ctx.save_for_backward(row_gradient, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        scaled = ((g.float() * scale).to(g.dtype) for g in ctx.saved_tensors)  # a float16 scale could overflow
        return None, None, None, None, *scaled


@dataclass(frozen=True, slots=True)
class LinearHead:
    """A head of one linear layer; `chunk`: rows per chunk, None: limited by memory."""

    layer: nn.Linear
    chunk: int | None = None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.layer.parameters() if parameter.requires_grad]

    def loss_sum(self, rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum of weighted cross-entropies over all targets except IGNORE, in float32."""
        with for_trained_head(rows, self.trained) as inputs:
            parameters = (self.layer.weight, self.layer.bias)
            loss: Tensor = _LinearLoss.apply(self, targets, weights, inputs, *parameters)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def scores(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each target in float32, 0 for IGNORE, and the token of the largest logit."""
        losses = torch.empty(targets.shape, dtype=torch.float32, device=rows.device)
        chosen = torch.empty(targets.shape, dtype=torch.long, device=rows.device)
        with for_trained_head(rows, self.trained) as inputs:
            for part, _, logits, _ in self.chunks(inputs):
                chosen[part] = logits.argmax(-1)
                width = logits.stride(0)
                losses[part] = loss_and_grad_inplace(logits, targets[part], None, gradient=False, width=width)
        return losses, chosen

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield slice, rows and logits of each chunk, and the weight, in autocast's dtype; all logits share one buffer
        with padded rows.
        """
        dtype = autocast_dtype(rows)
        weight = self.layer.weight.detach().to(dtype)
        bias = None if self.layer.bias is None else self.layer.bias.detach().to(dtype)
        width = -(-len(weight) // _VECTOR) * _VECTOR
        size = self.chunk or rows_of_a_chunk(len(rows), width, weight.element_size())
        buffer = weight.new_empty(min(size, len(rows)), width)[:, : len(weight)]
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            piece = rows[part].to(dtype)
            logits = buffer[: len(piece)]
            if bias is None:
                torch.mm(piece, weight.t(), out=logits)
            else:
                torch.addmm(bias, piece, weight.t(), out=logits)
            yield part, piece, logits, weight


def rows_of_a_chunk(rows: int, vocabulary: int, number_bytes: int) -> int:
    """Return the rows per chunk within a memory bound, with chunks of about equal size."""
    most = max(_MIN_ROWS, min(_MAX_ROWS, _MAX_LINEAR_CHUNK_BYTES // (number_bytes * vocabulary)))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def linear_head(lm: Any) -> LinearHead | None:
    """Return the head as a linear layer; None if it has more operations than one product, or other trained parts."""
    layer = lm.get_output_embeddings()
    # PEFT's wrapper around a head and its trained copy
    if isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
        (layer,) = layer.modules_to_save.values()
    if type(layer) is not nn.Linear:
        return None
    ids = {id(parameter) for parameter in layer.parameters()}
    if any(id(parameter) not in ids for parameter in head_parameters(lm)):
        return None
    row = layer.weight.detach().new_ones(1, layer.in_features)
    with torch.no_grad(), _ProductCounter(layer.weight) as counter:
        own_head(lm)(row)
    return LinearHead(layer) if counter.products == 1 and not counter.others else None


class _ProductCounter(TorchDispatchMode):
    """Counter of the products with a weight, and of other operations."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.others = 0
        self._weight = weight.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        tensors = (value for value in args if isinstance(value, Tensor))
        if name in _PRODUCTS and any(tensor.untyped_storage()._cdata == self._weight for tensor in tensors):
            self.products += 1
        elif name not in _FREE and func.namespace != "prim":  # `prim` reads the device of tensors without memory
            self.others += 1
        return func(*args, **(kwargs or {}))


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: LinearHead,
        targets: Tensor,
        weights: Tensor | None,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        of_rows, of_weight, of_bias = ctx.needs_input_grad[3:]
        has_gradient = of_rows or of_weight or of_bias
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        ctx.gradients = gradients = [
            torch.empty_like(rows) if of_rows else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight else None,
            torch.zeros_like(weight[:, 0], dtype=torch.float32) if of_bias else None,
        ]
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        for part, piece, logits, cast_weight in head.chunks(rows):
            factors = None if weights is None else weights[part]
            width = logits.stride(0)
            total += loss_and_grad_inplace(logits, targets[part], factors, gradient=has_gradient, width=width).sum()
            _add_gradients(gradients, part, piece, logits, cast_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss are freed: it supports one backward pass")
        scaled = (
            None if gradient is None else scaled_gradient(gradient, upstream[0], dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, None, None, *scaled


def _add_gradients(gradients: list[Tensor | None], part: slice, piece: Tensor, logits: Tensor, weight: Tensor) -> None:
    """Add the gradients of one chunk, whose logits hold their gradient; sums are in float32."""
    of_rows, of_weight, of_bias = gradients
    if of_rows is not None and of_rows.dtype == logits.dtype:
        torch.mm(logits, weight, out=of_rows[part])
    elif of_rows is not None:
        of_rows[part] = logits @ weight
    if of_weight is not None and logits.dtype == torch.float32:
        of_weight.addmm_(logits.t(), piece)
    elif of_weight is not None:
        of_weight.add_(logits.t() @ piece)
    if of_bias is not None:
        of_bias.add_(logits.sum(0, dtype=torch.float32))


def scaled_gradient(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in place if possible; in float32, because a float16 scale could overflow."""
    if gradient.dtype == torch.float32:
        return gradient.mul_(scale).to(dtype)
    return (gradient.float() * scale).to(dtype)
