"""Recurrent mixers: layers that carry a state from token to token by a convolution, linear attention or Mamba.

Packed documents go through such a mixer as padded rows and come back side by side, by the model's own code on any
machine. Everything else of the model stays packed. Rows are padded on the right, where no real token looks.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from app.batch import PackedSequences
from app.config.kinds import uncalled_modules, without_numbers

_MAX_PADDING = 2  # padded rows have less than so many times the tokens of their documents
# fast kernels of mixers: package, its module, and transformers' plain functions that replace it
_KERNELS = {
    "causal-conv1d": ("causal_conv1d", {"causal_conv1d_fn"}),
    "flash-linear-attention": ("fla", {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}),
    "mamba-ssm": ("mamba_ssm", {"mamba2_chunk_scan", "mamba_selective_scan"}),
}


def recurrent_mixers(lm: nn.Module) -> list[Any]:
    """The outermost modules with a convolution over tokens, or a decay, of their own."""
    found: dict[str, nn.Module] = {}
    for name, module in lm.named_modules():
        is_recurrent = hasattr(module, "slope_rate") or any(isinstance(each, nn.Conv1d) for each in module.children())
        if is_recurrent and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.values())


def layers_read_past(lm: nn.Module) -> set[str]:
    """Return the names of linear layers that are not called in training, so that an adapter would have no gradient.

    Their weight, if used at all, is read past the layer, so it must not be quantized. The table of kinds has what was
    seen on a CPU. Mamba's kernels read more: a mixer of state spaces has the skip connection D; those of the delta rule
    call their layers.
    """
    modules, kind = dict(lm.named_modules()), getattr(getattr(lm, "config", None), "model_type", "")
    mixers = (name for name, module in modules.items() if hasattr(module, "A_log") and hasattr(module, "D"))
    names = {f"{mixer}.{layer}" for mixer in mixers for layer in ("out_proj", "dt_proj")} & modules.keys()
    uncalled = tuple(f"{name}." for name in uncalled_modules(kind))
    linear = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    return names | {name for name in linear if f"{without_numbers(name)}.".startswith(uncalled)}


def missing_kernels(mixers: list[Any]) -> list[str]:
    """Packages that would compute these mixers faster on a GPU."""
    functions = {name for mixer in mixers for name in vars(sys.modules[type(mixer).__module__])}
    return [package for package, (module, plain) in _KERNELS.items() if plain & functions and find_spec(module) is None]


def lay_aside(lm: Any) -> None:
    """Give the mixers of `lm` packed documents as padded rows from now on."""
    mixers = recurrent_mixers(lm)
    if mixers:
        rows = _PaddedRows()
        lm.base_model.register_forward_pre_hook(rows.lay_out, with_kwargs=True)
        for mixer in mixers:
            mixer.forward = rows.within(mixer.forward)


class _PaddedRows:
    """Where packed tokens stand in padded rows, for the batch computed last: layers may be computed again in backward.

    Documents of similar lengths make a block of rows each, so that one long document does not pad many short ones.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # [rows, longest] packed places, those of padding arbitrary
        self._back = torch.empty(0)  # [S] places in the rows of all blocks, one after another

    def lay_out(self, _backbone: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        """Compute on the device, from host lengths and `cu_seqlens`: nothing waits."""
        documents: PackedSequences | None = given.get("documents")
        self._blocks = []
        if documents is None or len(documents.lengths) == 1 or given["input_ids"].shape[0] > 1:
            return
        lengths, count = sorted(documents.lengths, reverse=True), len(documents.lengths)
        bounds, size = documents.cu_seqlens[: count + 1].long(), sum(lengths)
        order = bounds.diff().argsort(descending=True, stable=True)
        starts, ends = bounds[order, None], bounds[order + 1, None]
        at, filled, self._back = 0, 0, bounds.new_empty(size + 1)
        while at < count:
            longest = lengths[at]
            end = next((i for i in range(at, count) if _MAX_PADDING * lengths[i] <= longest), count)
            places = starts[at:end] + torch.arange(longest, device=bounds.device)
            tokens = torch.where(places < ends[at:end], places, size).flatten()  # padding goes to one place past them
            self._back.scatter_(0, tokens, torch.arange(filled, filled + len(tokens), device=bounds.device))
            self._blocks.append(places.clamp(max=size - 1))
            at, filled = end, filled + len(tokens)
        self._back = self._back[:size]

    def within(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`own` forward of a mixer, on padded rows."""

        @wraps(own)
        def forward(*args: Any, **given: Any) -> Any:
            if not self._blocks:
                return own(*args, **given)
            found = []
            for places in self._blocks:
                rows_args, rows_given = tree_map_only(Tensor, partial(self._in_rows, places), (args, given))
                found.append(own(*rows_args, **rows_given))
            return tree_map(self._side_by_side, *found)

        return forward

    def _in_rows(self, places: Tensor, packed: Tensor) -> Tensor:
        """What has a number or more for each packed token; anything else as it is."""
        if packed.ndim < 2 or packed.shape[:2] != (1, len(self._back)):
            return packed
        rows: Tensor = packed[0].index_select(0, places.flatten()).unflatten(0, places.shape)
        return rows

    def _side_by_side(self, *found: Any) -> Any:
        """One of the outputs, of all blocks."""
        is_rows = (
            isinstance(each, Tensor) and each.shape[:2] == p.shape for each, p in zip(found, self._blocks, strict=True)
        )
        if not all(is_rows):
            return found[-1]
        return torch.cat([each.flatten(0, 1) for each in found]).index_select(0, self._back)[None]
