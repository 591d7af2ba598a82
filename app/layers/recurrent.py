"""Recurrent mixers: layers that carry a state from token to token by a convolution, linear attention or Mamba.

Packed documents go through such a mixer as padded rows and are packed again, by the model's own code on any machine.
The rest of the model stays packed. Rows are padded on the right, which no real token sees.
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

_MAX_PADDING = 2  # padded rows have less than this many times the tokens of their documents
# fast kernels of mixers: package, its module, and transformers' plain functions that replace it
_KERNELS = {
    "causal-conv1d": ("causal_conv1d", {"causal_conv1d_fn"}),
    "flash-linear-attention": ("fla", {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}),
    "mamba-ssm": ("mamba_ssm", {"mamba2_chunk_scan", "mamba_selective_scan"}),
}


def recurrent_mixers(lm: nn.Module) -> list[Any]:
    """Return the outermost modules that contain a convolution over tokens or a decay."""
    mixers: dict[str, nn.Module] = {}
    for name, module in lm.named_modules():
        is_recurrent = hasattr(module, "slope_rate") or any(isinstance(child, nn.Conv1d) for child in module.children())
        if is_recurrent and not any(name.startswith(f"{outer}.") for outer in mixers):
            mixers[name] = module
    return list(mixers.values())


def layers_read_past(lm: nn.Module) -> set[str]:
    """Return the names of linear layers that are not called in training, so that an adapter would have no gradient.

    Their weight, if used at all, is read directly, so it must not be quantized. The table of kinds has those found on
    a CPU. Mamba's kernels read more weights: state-space mixers have the skip connection D; delta-rule mixers call
    their layers.
    """
    modules, kind = dict(lm.named_modules()), getattr(getattr(lm, "config", None), "model_type", "")
    mixers = (name for name, module in modules.items() if hasattr(module, "A_log") and hasattr(module, "D"))
    names = {f"{mixer}.{layer}" for mixer in mixers for layer in ("out_proj", "dt_proj")} & modules.keys()
    uncalled = tuple(f"{name}." for name in uncalled_modules(kind))
    linear = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    return names | {name for name in linear if f"{without_numbers(name)}.".startswith(uncalled)}


def missing_kernels(mixers: list[Any]) -> list[str]:
    """Return the missing packages that would compute these mixers faster on a GPU."""
    functions = {name for mixer in mixers for name in vars(sys.modules[type(mixer).__module__])}
    return [package for package, (module, plain) in _KERNELS.items() if plain & functions and find_spec(module) is None]


def pad_mixers(lm: Any) -> None:
    """Pass packed documents to the mixers of `lm` as padded rows."""
    mixers = recurrent_mixers(lm)
    if mixers:
        rows = _PaddedRows()
        lm.base_model.register_forward_pre_hook(rows.lay_out, with_kwargs=True)
        for mixer in mixers:
            mixer.forward = rows.on_rows(mixer.forward)


class _PaddedRows:
    """Positions of packed tokens in padded rows, for the last batch: layers may be recomputed in the backward pass.

    Documents of similar lengths share a block of rows, so that one long document does not pad many short ones.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # [rows, longest] packed positions, arbitrary for padding
        self._back = torch.empty(0)  # [S] positions in the concatenated rows of all blocks

    def lay_out(self, _backbone: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Compute the rows on the device, from host lengths and `cu_seqlens`, without waiting."""
        documents: PackedSequences | None = kwargs.get("documents")
        self._blocks = []
        if documents is None or len(documents.lengths) == 1 or kwargs["input_ids"].shape[0] > 1:
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
            # padding goes to one position after the tokens
            tokens = torch.where(places < ends[at:end], places, size).flatten()
            self._back.scatter_(0, tokens, torch.arange(filled, filled + len(tokens), device=bounds.device))
            self._blocks.append(places.clamp(max=size - 1))
            at, filled = end, filled + len(tokens)
        self._back = self._back[:size]

    def on_rows(self, mixer: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a `mixer` on padded rows."""

        @wraps(mixer)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._blocks:
                return mixer(*args, **kwargs)
            outputs = []
            for places in self._blocks:
                rows_args, rows_kwargs = tree_map_only(Tensor, partial(self._in_rows, places), (args, kwargs))
                outputs.append(mixer(*rows_args, **rows_kwargs))
            return tree_map(self._side_by_side, *outputs)

        return forward

    def _in_rows(self, places: Tensor, packed: Tensor) -> Tensor:
        """Return padded rows of a tensor with values per packed token; any other tensor unchanged."""
        if packed.ndim < 2 or packed.shape[:2] != (1, len(self._back)):
            return packed
        rows: Tensor = packed[0].index_select(0, places.flatten()).unflatten(0, places.shape)
        return rows

    def _side_by_side(self, *outputs: Any) -> Any:
        """Return an output of all blocks as packed tokens."""
        is_rows = (
            isinstance(output, Tensor) and output.shape[:2] == places.shape
            for output, places in zip(outputs, self._blocks, strict=True)
        )
        if not all(is_rows):
            return outputs[-1]
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, self._back)[None]
