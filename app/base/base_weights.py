"""Weights of a base: tensors read one at a time, and the loop that fills a model with them.

This works with any number of processes. The structure comes first, on meta: quantized layers, adapters, shards. Then
one loop over the base tensors fills the part that this process keeps, so that no process holds the whole model.
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

from app.base.packed_weights import PackedTensor
from app.base.weight_files import require_finite, require_float
from app.layers.experts import PACKED, as_rows, stacks_of
from app.layers.quantization import Quantizer, backbone_linear_layers, is_conv1d


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Dtype and device of the base weights, and the attention name in transformers."""

    dtype: torch.dtype
    device: torch.device
    attention: str


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A base tensor that is not read yet. Reading may return mapped or shared memory: copy it to keep it."""

    name: str
    shape: torch.Size
    whole: Callable[[], Tensor]
    rows: Callable[[int, int], Tensor]  # start (included) and end (excluded)
    file: str = ""  # name of its file
    packed: PackedTensor | None = None  # its place in the files, if it is stored in 4 bits


# Sets the values of a module's parameter; a process may keep only some rows
Put = Callable[[nn.Module, str, SourceTensor], None]


class Base:
    """A base model. `lm` is on meta until it is filled, except for computed buffers."""

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
        # at opening: a head that is cast later is rounded like the backbone
        self._dtypes = {name: parameter.dtype for name, parameter in lm.named_parameters(remove_duplicate=False)}
        self._readable = readable  # context of reading: one message for damaged files
        self._modules = dict(lm.named_modules())
        self._quantizer: Quantizer | None = None
        self._plain: dict[str, nn.Module] = {}  # layers before their quantization
        self._stacks: dict[str, torch.Size] = {}  # shapes of quantized expert stacks, by name

    def whole(self) -> Any:
        """Return the model with all weights in this process."""
        if self._tensors is not None:
            self.fill(put_whole)
        return self.lm

    def quantize(self, quantizer: Quantizer) -> None:
        """Replace plain layers by quantized ones: structure only, on meta."""
        self._quantizer = quantizer
        if quantizer.packs:
            self._plain = {name: self.lm.get_submodule(name) for name in quantizer.layers(self.lm)}
        if quantizer.packs_experts:
            self._stacks = stacks_of(self.lm)
        quantizer.quantize(self.lm)
        self._modules = dict(self.lm.named_modules())

    def fill(self, put: Put, copies: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """Fill the model by `put`. `copies`: modules that start as copies, such as a head that PEFT trains."""
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
        """Fill the copies of modules that hold a tensor; copies of tied modules stay tied."""
        filled: list[tuple[nn.Parameter | None, nn.Parameter | None]] = []
        for module, name in holders:
            if module in copies:
                copied, before = copies[module], copies[module]._parameters[name]
                assert before is not None
                shared = next((after for original, after in filled if original is before), None)
                if shared is None:
                    put(copied, name, self._converted(tensor, before))
                else:
                    copied._parameters[name] = shared
                filled.append((before, copied._parameters[name]))

    def linear_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and float32 weight [out, in] of each layer that a quantizer replaces, read one at a time."""
        layers = {f"{name}.weight": self._modules[name] for name in backbone_linear_layers(self.lm)}
        tensors = self._tensors or (in_memory(*named) for named in self.lm.named_parameters())
        with self._readable():
            for tensor in tensors:
                if tensor.name in layers:
                    weight = tensor.whole().detach().float()
                    yield tensor.name.removesuffix(".weight"), weight.T if is_conv1d(layers[tensor.name]) else weight

    def _owners(self) -> dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
        """Return the modules of each parameter by id, several if tied; holding the parameter keeps its id unique."""
        owners: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in self._modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), (parameter, []))[1].append((module, name))
        return owners

    def _converted(self, tensor: SourceTensor, parameter: nn.Parameter) -> SourceTensor:
        """Return the tensor in the dtype and on the device of training."""

        def convert(loaded: Tensor, *, copied: bool) -> Tensor:
            dtype = self._dtypes[tensor.name]
            target = dtype if loaded.is_floating_point() else loaded.dtype
            moved = loaded.to(self._options.device, target, copy=copied)
            _require_weights(tensor, moved, dtype)
            return moved.to(parameter.dtype)

        return SourceTensor(
            tensor.name,
            tensor.shape,
            lambda: convert(tensor.whole(), copied=True),
            lambda low, high: convert(tensor.rows(low, high), copied=False),
        )

    def _put_quantized(self, plain: nn.Module | None, module: nn.Module, tensor: SourceTensor, put: Put) -> None:
        """Quantize the whole tensor and put its bytes: a process that keeps some rows has all scales.

        `plain`: the layer before quantization, None for an expert stack.
        """
        assert self._quantizer is not None
        packed = tensor.packed
        if packed is not None and packed.numbers == self._quantizer.kind:
            stored = packed.packed()
            require_finite(f"the scale of {tensor.name}", stored.scales())
            self._put_layer(self._quantizer.stored(stored.to(self._options.device)), module, tensor, put)
            return
        weight: Any = tensor.whole()
        if hasattr(weight, "quant_state"):  # packed in the files by bitsandbytes
            weight = weight.to(self._options.device)
            weight.quant_state.dtype = self._options.dtype
        else:
            dtype = self._options.dtype if weight.is_floating_point() else weight.dtype
            weight = nn.Parameter(weight.to(self._options.device, dtype), requires_grad=False)
            _require_weights(tensor, weight, self._options.dtype)
        layer = as_rows(weight, turned=bool(module.is_turned)) if plain is None else copy.copy(plain)
        if plain is not None:
            layer._parameters = {"weight": weight, "bias": None}
        quantized = self._quantizer.quantized(layer)
        self._quantizer.share_state(quantized, module)
        self._put_layer(quantized, module, tensor, put)

    def _put_layer(self, quantized: nn.Module, module: nn.Module, tensor: SourceTensor, put: Put) -> None:
        for last, bytes_ in quantized.named_parameters():
            put(module, last, in_memory(tensor.name, bytes_))
        module._buffers.update(quantized._buffers)


def _require_weights(tensor: SourceTensor, numbers: Tensor, dtype: torch.dtype) -> None:
    """Refuse integers in place of weights of `dtype`, NaN and infinity, with the tensor name."""
    if tensor.file:
        name = f"{tensor.name} in {tensor.file}"
        require_float(name, numbers.dtype, dtype)
        require_finite(name, numbers)


def put_whole(module: nn.Module, name: str, tensor: SourceTensor) -> None:
    """Set a parameter to the whole tensor, in one process that keeps the whole model."""
    whole, expected = tensor.whole(), module._parameters[name]
    assert expected is not None
    if not isinstance(whole, nn.Parameter):  # Params4bit of bitsandbytes is one
        whole = nn.Parameter(whole, requires_grad=expected.requires_grad)
    module._parameters[name] = whole


def in_memory(name: str, tensor: Tensor) -> SourceTensor:
    """Wrap a tensor that is in memory."""
    return SourceTensor(name, tensor.shape, lambda: tensor, lambda low, high: tensor.detach()[low:high])


def random_tensors(lm: Any, device: torch.device, seed: int, rebuilt: Callable[[], Any]) -> Iterator[SourceTensor]:
    """Yield random tensors on `device` for an `lm` on meta, module by module; tied ones once.

    The values depend only on seed, kind, sizes and module name; other random numbers of the program are unaffected.
    `rebuilt` builds another `lm`, for parameters that only constructors initialize.
    """
    lm.tie_weights()
    done: set[int] = set()
    for name, module in lm.named_modules():
        parameters = {last: meta for last, meta in module._parameters.items() if meta is not None}
        if done.issuperset(map(id, parameters.values())):
            continue
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = drawn_parameters(lm, name, device, rebuilt)
        for last, meta in parameters.items():
            if id(meta) not in done:
                yield in_memory(f"{name}.{last}".lstrip("."), drawn[last])
        done.update(map(id, parameters.values()))


@torch.no_grad()
def drawn_parameters(lm: Any, name: str, device: torch.device, rebuilt: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the parameters of one module as the model initializes them: first by the module, then by those around
    it, because some kinds initialize by role. All other modules stay on meta, where initialization does nothing.

    As in transformers, the innermost model around a module initializes it.
    """
    module = lm.get_submodule(name)
    parts = name.split(".") if name else []
    around = [lm.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    on_meta = dict(module._parameters)
    drawn = {
        last: nn.Parameter(torch.full_like(meta, torch.nan, device=device))
        for last, meta in on_meta.items()
        if meta is not None
    }
    module._parameters.update(drawn)
    try:
        for at, inner in enumerate(around):
            next(outer for outer in around[at:] if hasattr(outer, "_init_weights"))._init_weights(inner)
        missing = [last for last, parameter in drawn.items() if bool(parameter.isnan().any())]
        if missing and is_conv1d(module):  # its constructor initializes after registering the weight
            nn.init.normal_(drawn["weight"], std=0.02)
            nn.init.zeros_(drawn["bias"])
        elif missing:
            constructed = _constructed(rebuilt, name, type(module))
            drawn |= {last: constructed[last].to(device, on_meta[last].dtype) for last in missing}
    finally:
        module._parameters.update(on_meta)
    return {last: parameter.detach() for last, parameter in drawn.items()}


def _constructed(build: Callable[[], Any], name: str, kind: type[nn.Module]) -> dict[str, Tensor]:
    """Return the values that the constructor sets in the parameters of one module of class `kind`."""
    parameters: dict[nn.Module, dict[str, Tensor]] = {}

    def keep(module: nn.Module, last: str, parameter: nn.Parameter | None) -> None:
        if type(module) is kind and parameter is not None:
            parameters.setdefault(module, {})[last] = parameter.detach().clone()

    with register_module_parameter_registration_hook(keep):
        lm = build()
    return parameters[lm.get_submodule(name)]
