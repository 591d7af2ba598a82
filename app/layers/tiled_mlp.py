"""Gated MLPs computed in tiles of rows: a long row takes the memory of one tile.

The output of a row depends on that row alone. The forward pass saves only the rows. The backward pass recomputes one
tile at a time, writes its gradient of the rows, and adds its gradients of trained parameters in float32.

The rows are saved by a function before the MLP. The recomputation of a checkpointed layer ends there, so the MLP runs
twice in a step, not three times.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.errors import ConfigError
from app.layers.activation_checkpointing import has_random_modules, repeated_layers
from app.layers.experts import expert_modules, other_stacks

Compute = Callable[[Any, Tensor], Tensor]  # of an MLP and its input


class Tiling:
    """How the MLPs of a model are computed; all of them share this object."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # of a tile
        self.compute: Compute = partial(in_tiles, own_forward, tokens)

    @contextmanager
    def computed_by(self, compute: Compute) -> Iterator[None]:
        """Compute the MLPs by another function inside this context."""
        before, self.compute = self.compute, compute
        try:
            yield
        finally:
            self.compute = before


def tile_mlps(lm: nn.Module, tokens: int) -> None:
    """Compute the MLPs of all layers in tiles of `tokens` rows; 0: as one."""
    require_tileable(lm, tokens)
    tiling = Tiling(tokens)
    for mlp in gated_mlps(lm) if tokens else ():
        mlp.tiling, mlp.untiled = tiling, mlp.forward
        mlp.forward = MethodType(_forward, mlp)


def _forward(mlp: Any, x: Tensor) -> Tensor:
    result: Tensor = mlp.tiling.compute(mlp, x)
    return result


def own_forward(mlp: Any, x: Tensor) -> Tensor:
    """Compute an MLP as one."""
    result: Tensor = mlp.untiled(x)
    return result


def tiling_of(network: nn.Module) -> Tiling | None:
    """Return how the MLPs of a model or layer are computed; None if they are not tiled."""
    return next((vars(module)["tiling"] for module in network.modules() if "tiling" in vars(module)), None)


def outside_graphs(network: nn.Module) -> None:
    """Leave the tiled MLPs out of graphs that torch.compile makes of their layers."""
    forward = torch.compiler.disable(_forward)
    for mlp in gated_mlps(network):
        mlp.forward = MethodType(forward, mlp)


# ---- MLPs that can be tiled


def require_tileable(lm: nn.Module, tokens: int) -> None:
    """Refuse tiles for a model whose MLPs cannot be computed in tiles; `lm` may be on meta."""
    reason = _obstacle(lm) if tokens else None
    if reason is not None:
        raise ConfigError(f"training.tile={tokens}: {reason}")


def _obstacle(lm: nn.Module) -> str | None:
    off = "Set training.tile=0"
    if expert_modules(lm) or other_stacks(lm):
        return f"this model has experts, whose layers are not tiled. {off}."
    counts = {len(gated_mlps(layer)) for layer in repeated_layers(lm)}
    if max(counts, default=0) != 1:
        return f"the layers of this model do not have one gated MLP (three linear layers and an activation). {off}."
    if any(has_random_modules(mlp) for mlp in gated_mlps(lm)):
        return f"the MLP has dropout, and the backward pass would draw another mask. {off}, or adapter.dropout=0."
    return None


def gated_mlps(network: nn.Module) -> list[Any]:
    """Return the gated MLPs in the repeated layers of a model, or in one layer."""
    layers = repeated_layers(network) or [network]
    return [module for layer in layers for module in layer.modules() if _is_gated_mlp(module)]


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module consists of two linear layers alike, one back to the input, and an activation."""
    linear = {child: layer for child in module.children() if (layer := _linear(child)) is not None}
    others = [type(child).__name__.lower() for child in module.children() if child not in linear]
    has_activation = any("dropout" not in name for name in others)
    has_others = _tensors(module) != sum(map(_tensors, linear))  # such as a factor for each column
    sizes = [(layer.in_features, layer.out_features) for layer in linear.values()]
    if len(sizes) != 3 or has_others or not has_activation:
        return False
    return any(size[0] != size[1] and sizes.count(size) == 2 and size[::-1] in sizes for size in sizes)


def _tensors(module: nn.Module) -> int:
    return len([*module.parameters(), *module.buffers()])


def _linear(module: Any) -> nn.Linear | None:
    """Return a linear layer, or the one inside an adapter."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return base if isinstance(base, nn.Linear) else None


# ---- tiles


def in_tiles(forward: Compute, tokens: int, mlp: Any, x: Tensor, *, pads: bool = False) -> Tensor:
    """Return the output of an MLP, computed by `forward` in tiles; `pads` pads the last tile to the same shape."""
    rows = x.flatten(0, -2)
    if len(rows) <= tokens:
        return forward(mlp, x)
    tiles = _Tiles(forward, tokens, mlp, x, pads=pads)
    trained = tiles.trained()
    if torch.is_grad_enabled() and (x.requires_grad or trained):
        # rows without a gradient are saved there too
        saved = _Saved.apply(rows, torch.empty(0, device=x.device, requires_grad=True))  # type: ignore[no-untyped-call]
        out: Tensor = _Tiled.apply(saved, saved.grad_fn, tiles, *trained)  # type: ignore[no-untyped-call]
    else:
        out = tiles.output(rows)
    return out.view(*x.shape[:-1], -1)


class _Tiles:
    """The tiles of one call of an MLP, with the autocast of this call."""

    def __init__(self, forward: Compute, tokens: int, mlp: Any, x: Tensor, *, pads: bool) -> None:
        self._forward, self._tokens, self._mlp, self._pads = forward, tokens, mlp, pads
        kind = x.device.type
        self._autocast = torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._mlp.parameters() if parameter.requires_grad]

    def output(self, rows: Tensor) -> Tensor:
        out = None
        for part in self._parts(len(rows)):
            result = self._computed(rows[part])
            out = result.new_empty(len(rows), result.shape[-1]) if out is None else out
            out[part] = result
            del result  # before the next tile is computed
        assert out is not None
        return out

    def gradients(self, rows: Tensor, upstream: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of the rows and of the trained parameters."""
        of_rows, trained = torch.empty_like(rows), self.trained()
        sums: list[Tensor | None] = [None] * len(trained)
        for part in self._parts(len(rows)):
            tile = rows[part].detach().requires_grad_()
            with torch.enable_grad(), self._autocast:
                out = self._computed(tile)
            first, *others = torch.autograd.grad(out, [tile, *trained], upstream[part], allow_unused=True)
            of_rows[part] = first
            sums = [_added(total, gradient) for total, gradient in zip(sums, others, strict=True)]
            del out, first, others
        return of_rows, [
            None if total is None else total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True)
        ]

    def _parts(self, count: int) -> Iterator[slice]:
        return (slice(start, min(start + self._tokens, count)) for start in range(0, count, self._tokens))

    def _computed(self, tile: Tensor) -> Tensor:
        missing = self._tokens - len(tile) if self._pads else 0
        if not missing:
            return self._forward(self._mlp, tile)
        return self._forward(self._mlp, F.pad(tile, (0, 0, 0, missing)))[: len(tile)]


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return total if gradient is None else gradient.float()
    return total.add_(gradient)


class _Saved(torch.autograd.Function):
    """The identity, which saves its input."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, _requires_gradient: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return upstream[0], None


class _Tiled(torch.autograd.Function):
    """An MLP that saves nothing. Trained parameters are inputs, so their hooks run once, after all tiles."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, saved: Any, tiles: _Tiles, *_trained: Tensor) -> Tensor:
        ctx.saved, ctx.tiles = saved, tiles
        return tiles.output(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved.saved_tensors
        of_rows, of_trained = ctx.tiles.gradients(rows, upstream[0])
        return of_rows, None, None, *of_trained
