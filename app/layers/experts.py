"""Mixture of experts: stacked expert matrices, which transformers calls through an interface, and the router loss.

Our function multiplies rows sorted by expert with the stacks, plain or quantized (dequantized on use), and with PEFT's
adapters on them. PEFT's own forward adds the update of a whole stack to the stack in each pass.

The load-balancing loss is computed per document, so that no split of rows changes it. On one document it equals
transformers' `load_balancing_loss_func`, which otherwise depends on the batch and its padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import IGNORE, Batch
from app.config.schema import AdapterConfig, TaskConfig
from app.errors import ConfigError
from app.layers.comparison import Comparison, attempt, compare_forwards
from app.layers.operations import autocast_dtype, uses_kernels

NAME = "app_grouped"  # our function in transformers' interface
PACKED = "packed"  # the submodule of experts with quantized stacks
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_COMPARED_ROWS = 8
_EXACT = 1e-5
_RANKS = 8  # a grouped product needs rows of a multiple of 16 bytes


class Packer(Protocol):
    """A quantizer that packs a stack as one linear layer, with the matrices of all experts stacked by rows."""

    by_outputs: bool  # whether a row of a stack [experts, in, out] is an output, else an input

    def quantized(self, layer: Any) -> nn.Module:
        """Return the quantized layer."""

    def unpacked(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight of a quantized layer."""


def packed_and_unpacked(packer: Packer, weight: Tensor) -> Tensor:
    """Return a weight [out, in] after quantizing and dequantizing."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return packer.unpacked(packer.quantized(layer), weight.dtype)


def rounded_stack(packer: Packer, stack: Tensor, *, is_transposed: bool) -> Tensor:
    """Return a stack of experts after quantizing and dequantizing."""
    turned = is_transposed and packer.by_outputs
    rows = packed_and_unpacked(packer, as_rows(stack, turned=turned).weight)
    return _stacked(rows, stack.shape, turned=turned)


def expert_modules(network: nn.Module) -> dict[str, Any]:
    """Return the modules that call transformers' interface and have stacks [experts, a, b], by name."""
    return {n: m for n, m in network.named_modules() if hasattr(m, "is_transposed") and stack_shapes(m)}


def stack_shapes(experts: nn.Module) -> dict[str, torch.Size]:
    """Return the stack shapes of an experts module, packed or not, by name, in parameter order."""
    packed: Any = experts._modules.get(PACKED)
    if packed is not None:
        return {name: layer.stack for name, layer in packed.named_children()}
    stacks = {name: stack for name, stack in experts._parameters.items() if name in _STACKS and stack is not None}
    return {name: stack.shape for name, stack in stacks.items() if stack.ndim == 3}


def stacks_of(lm: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of all stacks of a model, by parameter name."""
    return {
        f"{place}.{name}": shape
        for place, experts in expert_modules(lm).items()
        for name, shape in stack_shapes(experts).items()
    }


def other_stacks(lm: nn.Module) -> list[str]:
    """Return the names of expert stacks that do not call transformers' interface."""
    supported = stacks_of(lm)
    stacks = (name for name, parameter in lm.named_parameters() if ".experts." in name and parameter.ndim == 3)
    return [name for name in stacks if name not in supported]


def stack_layers(network: nn.Module) -> set[str]:
    """Return the names of the layers with packed stacks."""
    return {name for name, module in network.named_modules() if hasattr(module, "stack")}


def is_turned(experts: Any, packer: Packer) -> bool:
    """Return whether the matrices of stacks are transposed before they are packed."""
    return bool(experts.is_transposed and packer.by_outputs)


def sizes_of_rows(lm: nn.Module, packer: Packer) -> dict[str, tuple[int, int]]:
    """Return rows and columns of all stacks as linear layers, by parameter name."""
    return {
        f"{place}.{name}": (shape[0] * shape[2], shape[1]) if turned else (shape[0] * shape[1], shape[2])
        for place, experts in expert_modules(lm).items()
        for turned in [is_turned(experts, packer)]
        for name, shape in stack_shapes(experts).items()
    }


def as_rows(stack: Tensor, *, turned: bool) -> nn.Linear:
    """Return a stack as a linear layer without bias; `turned`: with its matrices transposed."""
    matrices = stack.detach().mT if turned else stack.detach()
    weight = matrices.flatten(0, 1)
    rows = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    return rows


def pack(lm: nn.Module, packer: Packer) -> None:
    """Quantize the stacks of all experts, which may be on meta, and use our function for them."""
    for experts in expert_modules(lm).values():
        layers, turned = nn.ModuleDict(), is_turned(experts, packer)
        for name, shape in stack_shapes(experts).items():
            layer: Any = packer.quantized(as_rows(experts._parameters.pop(name), turned=turned))
            layers[name], layer.stack, layer.is_turned = layer, shape, turned
        experts.add_module(PACKED, layers)
        experts.packer = packer
    use_ours(lm)


def use_ours(lm: nn.Module) -> None:
    """Use our function in all experts of a model."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS[NAME] = grouped
    for experts in expert_modules(lm).values():
        experts.config._experts_implementation = NAME


@contextmanager
def shown_to_peft(lm: nn.Module) -> Iterator[None]:
    """Show packed stacks as parameters of their shapes inside this context, with the memory of one number."""
    modules = [experts for experts in expert_modules(lm).values() if PACKED in experts._modules]
    for experts in modules:
        for name, layer in experts.packed.named_children():
            one = torch.zeros(1, device=next(layer.parameters()).device)
            experts.register_parameter(name, nn.Parameter(one.expand(layer.stack), requires_grad=False))
    try:
        yield
    finally:
        for experts in modules:
            for name in stack_shapes(experts):
                del experts._parameters[name]


class _FrozenProduct(torch.autograd.Function):
    """The product of rows sorted by expert with a packed stack, which is dequantized again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, experts: Any, name: str, ends: Tensor) -> Tensor:
        ctx.experts, ctx.name = experts, name
        ctx.save_for_backward(ends)
        return F.grouped_mm(rows, _factor(experts, _unpacked(experts, name, rows.dtype)), offs=ends)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (ends,), (gradient,) = ctx.saved_tensors, upstream
        factor = _factor(ctx.experts, _unpacked(ctx.experts, ctx.name, gradient.dtype))
        return F.grouped_mm(gradient.contiguous(), factor.mT, offs=ends), None, None, None


def _unpacked(experts: Any, name: str, dtype: torch.dtype) -> Tensor:
    layer = experts.packed[name]
    return _stacked(experts.packer.unpacked(layer, dtype), layer.stack, turned=layer.is_turned)


def _stacked(rows: Tensor, shape: torch.Size, *, turned: bool) -> Tensor:
    """Return the stack of dequantized rows."""
    return rows.view(shape[0], shape[2], shape[1]).mT if turned else rows.view(shape)


def _factor(experts: Any, stack: Tensor) -> Tensor:
    """Return the stack as [experts, in, out]."""
    return stack if experts.is_transposed else stack.mT


def _product(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    if PACKED in experts._modules:
        out: Tensor = _FrozenProduct.apply(rows, experts, name, ends)  # type: ignore[no-untyped-call]
    else:
        out = F.grouped_mm(rows, _factor(experts, getattr(experts, name)), offs=ends)
    wrapper = vars(experts).get("adapters", {}).get(name)
    if wrapper is None or wrapper.disable_adapters:
        return out
    (adapter,) = wrapper.active_adapters
    a, b = (half[adapter].weight.to(rows.dtype) for half in (wrapper.lora_A, wrapper.lora_B))
    a = a.unflatten(0, (wrapper.num_experts, -1))  # [experts, r, in]: A has experts as the slow index
    b = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 1, 0)  # [experts, r, out]: the fast one
    if missing := -a.shape[1] % _RANKS:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, 0, 0, missing))
    down, up = a.mT.contiguous(), b.contiguous()
    inner = F.grouped_mm(rows, down, offs=ends)
    return out.add(F.grouped_mm(inner, up, offs=ends), alpha=wrapper.scaling[adapter])


def grouped(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each row's expert outputs; argument names are those of transformers' interface."""
    chosen, ids = top_k_index.shape[-1], top_k_index.flatten()
    order = torch.argsort(ids, stable=True)
    counts = ids.new_zeros(self.num_experts).index_add(0, ids, torch.ones_like(ids))
    ends, of_row = counts.cumsum(0).to(torch.int32), ids[order]
    first = "gate_up_proj" if self.has_gate else "up_proj"
    dtype = autocast_dtype(hidden_states) if PACKED in self._modules else getattr(self, first).dtype
    rows = hidden_states[order // chosen].to(dtype)
    inner = _product(self, first, rows, ends)
    if self.has_bias:
        inner = inner + getattr(self, f"{first}_bias")[of_row]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _product(self, "down_proj", inner.to(dtype), ends)
    if self.has_bias:
        out = out + self.down_proj_bias[of_row]
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.17 has none
        out = self.post_expert_norm(out)
    out = out * top_k_weights.flatten()[order, None]
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    result: Tensor = out[back].unflatten(0, (-1, chosen)).sum(1).to(hidden_states.dtype)
    return result


def adapted_experts(network: nn.Module) -> dict[nn.Module, list[Any]]:
    """Return PEFT's wrappers of stacks by experts module, from the innermost to the outermost."""
    wrappers: dict[nn.Module, list[Any]] = {}
    module: Any
    for module in network.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_base_layer"):
            wrappers.setdefault(module.get_base_layer(), []).insert(0, module)
    return wrappers


def moved_experts(network: nn.Module, local: Callable[[Tensor], Tensor]) -> list[list[bool]]:
    """Return whether each expert's adapter has a nonzero B, by experts module: an expert without tokens gets no
    gradient. `local` returns this process's part of a weight.
    """
    moved = []
    for wrappers in adapted_experts(network).values():
        halves = [(wrapper.num_experts, *wrapper.lora_B.values()) for wrapper in wrappers]
        touched = [local(half.weight).unflatten(1, (-1, experts)).any(1).any(0) for experts, half in halves]
        moved.append(torch.stack(touched).any(0).tolist())
    return moved


def expert_wrappers(lm: nn.Module) -> list[str]:
    """Return the future names of PEFT's wrappers of all stacks, which are nested."""
    depths = {place: range(len(stack_shapes(experts))) for place, experts in expert_modules(lm).items()}
    return [place + ".base_layer" * depth for place, levels in depths.items() for depth in levels]


def adapted_weight(lm: nn.Module, layer: str) -> str:
    """Return the name of the weight or stack of an adapter's `layer`: the first of several stacks is the innermost."""
    place = layer.replace(".base_layer", "")
    stacks = list(stack_shapes(lm.get_submodule(place)))
    return f"{place}.{stacks[-1 - layer.count('.base_layer')]}" if stacks else f"{place}.weight"


def layer_or_stack(adapted: Any) -> Any:
    """Return the layer inside an adapted one; for an adapted expert stack its layer or parameter."""
    base = adapted.get_base_layer()
    if not hasattr(adapted, "parameter_name"):
        return base
    return base.packed[adapted.parameter_name] if PACKED in base._modules else getattr(base, adapted.parameter_name)


def take_over(network: nn.Module) -> None:
    """Use our function in PEFT's wrappers of stacks and the experts inside; names and files stay."""
    for experts, wrappers in adapted_experts(network).items():
        vars(experts)["adapters"] = {wrapper.parameter_name: wrapper for wrapper in wrappers}
        for wrapper in wrappers:
            wrapper.forward = MethodType(_inside, wrapper)
    use_ours(network)


def _inside(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.base_layer(*args, **kwargs)


def compare_experts(
    network: nn.Module, arithmetic: Callable[[], Any], gathered: Callable[[nn.Module], Any] = nullcontext
) -> list[Comparison]:
    """Compare our function with the model's own forward of experts and PEFT's of adapters, once per kind of experts.

    `gathered` is a context in which a module has its weights.
    """
    wrappers, alike = adapted_experts(network), {}
    for experts in expert_modules(network).values():
        outer = wrappers.get(experts, [])
        alike[type(experts), *stack_shapes(experts).items(), len(outer)] = experts, outer
    comparisons = []
    for experts, outer in alike.values():
        with gathered(experts), arithmetic():
            faults = Exception if uses_kernels(next(experts.parameters()).device) else ()
            comparisons.append(attempt(partial(_compared, experts, outer), faults))
    return comparisons


def _compared(experts: Any, wrappers: list[Any]) -> Comparison:
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    shape = stack_shapes(experts)[first]
    count, inputs = shape[0], shape[1] if experts.is_transposed else shape[2]
    like = next(experts.parameters()) if PACKED in experts._modules else experts._parameters[first]
    places = torch.arange(max(_COMPARED_ROWS, count) * inputs, device=like.device, dtype=torch.float32)
    dtype = like.dtype if like.is_floating_point() else autocast_dtype(places)
    x = torch.sin(places).view(-1, inputs).to(dtype)
    chosen = torch.arange(2 * len(x), device=x.device).view(-1, 2) % count  # rows for every expert
    outermost = wrappers[-1] if wrappers else experts
    vars(experts)["adapters"] = {wrapper.parameter_name: wrapper for wrapper in wrappers}

    def reference(rows: Tensor) -> Tensor:  # before PEFT's wrappers are replaced
        with _plain(experts, dtype):
            out: Tensor = outermost(rows, chosen, rows[:, :2].sigmoid())
        return out

    halves = [(wrap.lora_A[name].weight, wrap.lora_B[name].weight) for wrap in wrappers for name in wrap.lora_A]
    what = f"{count} experts of {inputs} inputs, grouped, against the forward of the model and of PEFT"
    ours = lambda rows: grouped(experts, rows, chosen, rows[:, :2].sigmoid())  # noqa: E731
    trained = [half for both in halves for half in both]
    return compare_forwards(what, reference, ours, x, trained, [b for _, b in halves], _EXACT)


@contextmanager
def _plain(experts: Any, dtype: torch.dtype) -> Iterator[None]:
    """Use the model's own forward of experts inside this context, with dequantized stacks."""
    packed = list(stack_shapes(experts)) if PACKED in experts._modules else []
    experts.forward = MethodType(type(experts).forward.__wrapped__, experts)
    for name in packed:
        experts.register_parameter(name, nn.Parameter(_unpacked(experts, name, dtype), requires_grad=False))
    try:
        yield
    finally:
        del experts.forward
        for name in packed:
            del experts._parameters[name]


# ---- router loss


_MOST = 0.01  # of `auto`: config.json of gpt-oss has 0.9, which would outweigh the token loss


def coefficient_of(task: TaskConfig, adapter: AdapterConfig, lm: Any) -> float:
    """Return the factor of the router loss: `auto` is that of config.json, at most 0.01, if experts or routers are
    trained; else 0.
    """
    numbers = lm.config.get_text_config()
    has_loss = bool(_routers(lm)) and getattr(numbers, "num_experts_per_tok", None) is not None
    configured = getattr(numbers, "router_aux_loss_coef", None) if has_loss else None
    if task.router_loss == "auto":
        return min(configured or 0.0, _MOST) if adapter.kind == "none" or adapter.experts else 0.0
    if configured is None and task.router_loss:
        raise ConfigError(
            f"task.router_loss={task.router_loss:g}: a model of kind {lm.config.model_type} has no router with a "
            "load-balancing loss in transformers. Set task.router_loss=0."
        )
    return float(task.router_loss)


def _routers(network: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the modules with router logits, by transformers' own table, and the index of that output."""
    kinds: dict[Any, int] = {}
    for module in network.modules():
        routers = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        routers = routers if isinstance(routers, (list, tuple)) else [routers]
        kinds |= {router.target_class: router.index for router in routers}
    return [(module, kinds[type(module)]) for module in network.modules() if type(module) in kinds]


class RouterLoss:
    """The load-balancing loss from the logits of all routers in a training pass."""

    def __init__(self, lm: Any, coefficient: float) -> None:
        self.coefficient = coefficient
        self.sum = torch.zeros(())  # of the last pass, without its gradient
        self._chosen = int(lm.config.get_text_config().num_experts_per_tok)
        self._logits: list[Tensor] | None = None  # None: no training pass, or a recomputation
        for module, index in _routers(lm):
            module.register_forward_hook(partial(self._note, index))

    def _note(self, index: int, _router: nn.Module, _arguments: Any, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[index].flatten(0, -2))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record router logits inside this context."""
        self._logits = []
        try:
            yield
        finally:
            self._logits = None

    def of(self, batch: Batch) -> Tensor:
        """Return the sum over documents, weighted by their labels like the loss; call inside `reading`."""
        assert self._logits, "no router was called"
        size, experts = len(batch.lengths), self._logits[0].shape[-1]
        owner, lengths = _document_of_token(batch)  # `size` for padding
        chosen = torch.zeros((size + 1) * experts, device=owner.device)
        likely = torch.zeros(size + 1, experts, device=owner.device)
        for logits in self._logits:
            shares = logits.float().softmax(-1)
            places = owner[:, None] * experts + shares.topk(self._chosen, dim=-1).indices
            chosen = chosen.index_add(0, places.flatten(), torch.ones_like(places.flatten(), dtype=torch.float32))
            likely = likely.index_add(0, owner, shares)
        balance = experts * (chosen.view(size + 1, experts) * likely).sum(-1)[:-1]
        balance = balance / (lengths * len(self._logits)).square()
        weights = (batch.targets != IGNORE).float()
        if batch.weights is not None:
            weights = weights * batch.weights.per_target
        weight = torch.zeros(size + 1, device=owner.device).index_add(0, owner[batch.label_rows], weights)[:-1]
        total = (balance * weight).sum()  # not a vector product, which autocast would compute in 16 bits
        self.sum = total.detach()
        return total


def _document_of_token(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the document number of each position and the document lengths, on the device without waiting."""
    device, size = batch.ids.device, len(batch.lengths)
    starts, lengths = (torch.tensor(values).to(device, non_blocking=True) for values in (batch.starts, batch.lengths))
    places = torch.arange(batch.ids.numel(), device=device)
    if not size:  # an empty micro-batch that fills up a step
        return torch.zeros_like(places), lengths
    owner = torch.searchsorted(starts, places, right=True) - 1
    return torch.where(places - starts[owner] < lengths[owner], owner, size), lengths
