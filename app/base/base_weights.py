"""The weights of a base: where its tensors come from, one at a time, and the walk that fills a model with them.

The order serves any number of processes. Structure comes first, on meta: packed layers, adapters, shards. Then one
walk over the tensors of the base fills what this process keeps of them, so that no process ever holds the whole model.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from app.base.weight_files import require_finite, require_float
from app.layers.experts import PACKED, as_rows, stacks_of
from app.layers.quantization import Quantizer, backbone_linear_layers, is_conv1d


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How the weights of a base are stored, where, and with which attention, a name that transformers knows."""

    dtype: torch.dtype
    device: torch.device
    attention: str


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a base, not read yet. What is read may be a mapped piece of a file, or shared: copy it to keep it."""

    name: str
    shape: torch.Size
    whole: Callable[[], Tensor]
    rows: Callable[[int, int], Tensor]  # from the first up to the second number
    file: str = ""  # name of the file that has it


# Gives a module's parameter its numbers, of which a process may keep some rows only
Put = Callable[[nn.Module, str, SourceTensor], None]


class Base:
    """A base model. `lm` is on meta until it is filled, but for the buffers that it computes."""

    def __init__(
        self,
        lm: Any,
        options: LoadOptions,
        tensors: Iterable[SourceTensor],
        readable: Callable[[], AbstractContextManager[None]] = nullcontext,
        remarks: Iterable[str] = (),
    ) -> None:
        self.lm = lm
        self.remarks = tuple(remarks)
        self._options = options
        self._tensors: Iterable[SourceTensor] | None = tensors
        # of the model as it is opened: a head that is cast later is rounded as its backbone is
        self._dtypes = {name: each.dtype for name, each in lm.named_parameters(remove_duplicate=False)}
        self._readable = readable  # around reading: one message for files that are damaged
        self._modules = dict(lm.named_modules())
        self._quantizer: Quantizer | None = None
        self._plain: dict[str, nn.Module] = {}  # of layers that are quantized, as they were before
        self._stacks: dict[str, torch.Size] = {}  # of experts, by name, that are quantized

    def whole(self) -> Any:
        """The model with all of its weights in this process."""
        if self._tensors is not None:
            self.fill(put_whole)
        return self.lm

    def quantize(self, quantizer: Quantizer) -> None:
        """Quantized layers in place of plain ones: structure alone, on meta."""
        self._quantizer = quantizer
        if quantizer.packs:
            self._plain = {name: self.lm.get_submodule(name) for name in backbone_linear_layers(self.lm)}
        if quantizer.packs_experts:
            self._stacks = stacks_of(self.lm)
        quantizer.quantize(self.lm)
        self._modules = dict(self.lm.named_modules())

    def fill(self, put: Put, copies: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """`copies`: modules that begin with the numbers of others, as a head that an adapter trains."""
        assert self._tensors is not None
        owners = self._owners()
        with self._readable():
            for tensor in self._tensors:
                place, _, last = tensor.name.rpartition(".")
                if place in self._plain and last == "weight":
                    self._put_quantized(self._plain[place], self._modules[place], tensor, put)
                    continue
                if tensor.name in self._stacks:
                    self._put_quantized(None, self._modules[f"{place}.{PACKED}.{last}"], tensor, put)
                    continue
                module = self._modules[place]
                buffer = module._buffers.get(last)
                if buffer is not None:
                    module._buffers[last] = tensor.whole().to(buffer.dtype, copy=True)
                    continue
                parameter, holders = owners[id(module._parameters[last])]
                put(module, last, self._converted(tensor, parameter))
                for other, name in holders:
                    other._parameters[name] = module._parameters[last]
                self._put_copies(tensor, put, copies or {}, holders)
        self._tensors = None
        for module in self.lm.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._options.device)

    def _put_copies(
        self,
        tensor: SourceTensor,
        put: Put,
        copies: Mapping[nn.Module, nn.Module],
        holders: Iterable[tuple[nn.Module, str]],
    ) -> None:
        """Fill the copies of the modules that hold a tensor; copies of tied ones stay tied."""
        filled: list[tuple[nn.Parameter | None, nn.Parameter | None]] = []
        for module, name in holders:
            if module in copies:
                copied, before = copies[module], copies[module]._parameters[name]
                assert before is not None
                known = next((after for each, after in filled if each is before), None)
                if known is None:
                    put(copied, name, self._converted(tensor, before))
                else:
                    copied._parameters[name] = known
                filled.append((before, copied._parameters[name]))

    def linear_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight [out, in] in float32 of each layer that a quantizer replaces, read one at a time."""
        layers = {f"{name}.weight": self._modules[name] for name in backbone_linear_layers(self.lm)}
        tensors = self._tensors or (in_memory(*each) for each in self.lm.named_parameters())
        with self._readable():
            for tensor in tensors:
                if tensor.name in layers:
                    weight = tensor.whole().detach().float()
                    yield tensor.name.removesuffix(".weight"), weight.T if is_conv1d(layers[tensor.name]) else weight

    def _owners(self) -> dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
        """Modules of each parameter, several of tied ones, by id; holding the parameter keeps its id unique."""
        found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in self._modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
        return found

    def _converted(self, tensor: SourceTensor, parameter: nn.Parameter) -> SourceTensor:
        """The tensor in the dtype and on the device of training."""

        def convert(given: Tensor, *, copied: bool) -> Tensor:
            dtype = self._dtypes[tensor.name]
            moved = given.to(self._options.device, dtype if given.is_floating_point() else given.dtype, copy=copied)
            _require_weights(tensor, moved, dtype)
            return moved.to(parameter.dtype)

        return SourceTensor(
            tensor.name,
            tensor.shape,
            lambda: convert(tensor.whole(), copied=True),
            lambda low, high: convert(tensor.rows(low, high), copied=False),
        )

    def _put_quantized(self, plain: nn.Module | None, module: nn.Module, tensor: SourceTensor, put: Put) -> None:
        """Quantize a tensor whole and put its bytes: a process that keeps some rows of them has the scales of all.

        `plain`: the layer as it was, None for a stack of experts.
        """
        assert self._quantizer is not None
        weight: Any = tensor.whole()
        if hasattr(weight, "quant_state"):  # packed in the files
            weight = weight.to(self._options.device)
            weight.quant_state.dtype = self._options.dtype
        else:
            dtype = self._options.dtype if weight.is_floating_point() else weight.dtype
            weight = nn.Parameter(weight.to(self._options.device, dtype), requires_grad=False)
            _require_weights(tensor, weight, self._options.dtype)
        layer = as_rows(weight) if plain is None else copy.copy(plain)
        if plain is not None:
            layer._parameters = {"weight": weight, "bias": None}
        quantized = self._quantizer.quantized(layer)
        self._quantizer.share_state(quantized, module)
        for last, bytes_ in quantized.named_parameters():
            put(module, last, in_memory(tensor.name, bytes_))
        module._buffers.update(quantized._buffers)


def _require_weights(tensor: SourceTensor, numbers: Tensor, dtype: torch.dtype) -> None:
    """Refuse what a file has in place of weights of `dtype`, by the name of the tensor."""
    if tensor.file:
        name = f"{tensor.name} in {tensor.file}"
        require_float(name, numbers.dtype, dtype)
        require_finite(name, numbers)


def put_whole(module: nn.Module, name: str, tensor: SourceTensor) -> None:
    """All of it, by one process that keeps the whole model."""
    whole, expected = tensor.whole(), module._parameters[name]
    assert expected is not None
    if not isinstance(whole, nn.Parameter):  # or one of bitsandbytes' class
        whole = nn.Parameter(whole, requires_grad=expected.requires_grad)
    module._parameters[name] = whole


def in_memory(name: str, tensor: Tensor) -> SourceTensor:
    """A tensor that is there."""
    return SourceTensor(name, tensor.shape, lambda: tensor, lambda low, high: tensor.detach()[low:high])


def random_tensors(lm: Any, device: torch.device, seed: int, rebuilt: Callable[[], Any]) -> Iterator[SourceTensor]:
    """Tensors on `device` for an `lm` on meta, those of one module at a time; tied ones once.

    The numbers depend on seed, kind, sizes and the module's name alone, and what the rest of the program draws stays
    what it was. `rebuilt` makes another `lm`, for what only constructors initialize.
    """
    lm.tie_weights()
    done: set[int] = set()
    for name, module in lm.named_modules():
        own = {last: each for last, each in module._parameters.items() if each is not None}
        if done.issuperset(map(id, own.values())):
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = drawn_parameters(lm, name, device, rebuilt)
        for last, meta in own.items():
            if id(meta) not in done:
                yield in_memory(f"{name}.{last}".lstrip("."), drawn[last])
        done.update(map(id, own.values()))


@torch.no_grad()
def drawn_parameters(lm: Any, name: str, device: torch.device, rebuilt: Callable[[], Any]) -> dict[str, Tensor]:
    """The parameters of one module by the model's own initialization: the module's, then that of those around it, for
    some kinds treat modules by their role in these. All other modules stay on meta, where drawing does nothing.

    As in transformers, the innermost model around a module initializes it.
    """
    module = lm.get_submodule(name)
    parts = name.split(".") if name else []
    around = [lm.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    on_meta = dict(module._parameters)
    drawn = {
        last: nn.Parameter(torch.full_like(each, torch.nan, device=device))
        for last, each in on_meta.items()
        if each is not None
    }
    module._parameters.update(drawn)
    try:
        for at, each in enumerate(around):
            next(outer for outer in around[at:] if hasattr(outer, "_init_weights"))._init_weights(each)
        forgotten = [last for last, each in drawn.items() if bool(each.isnan().any())]
        if forgotten and is_conv1d(module):  # its constructor draws only after it has registered the weight
            nn.init.normal_(drawn["weight"], std=0.02)
            nn.init.zeros_(drawn["bias"])
        elif forgotten:
            constructed = _constructed(rebuilt, name, type(module))
            drawn |= {last: constructed[last].to(device, on_meta[last].dtype) for last in forgotten}
    finally:
        module._parameters.update(on_meta)
    return {last: each.detach() for last, each in drawn.items()}


def _constructed(build: Callable[[], Any], name: str, kind: type[nn.Module]) -> dict[str, Tensor]:
    """What the constructor gives the parameters of one module, of a class `kind`."""
    found: dict[nn.Module, dict[str, Tensor]] = {}

    def keep(module: nn.Module, last: str, parameter: nn.Parameter | None) -> None:
        if type(module) is kind and parameter is not None:
            found.setdefault(module, {})[last] = parameter.detach().clone()

    with register_module_parameter_registration_hook(keep):
        lm = build()
    return found[lm.get_submodule(name)]
