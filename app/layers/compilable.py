"""Obstacles to compiled layers, known before a weight is loaded, and what their matrix products cost."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from app.batch import Batch
from app.config.compile_rules import Obstacle
from app.config.schema import CompileConfig
from app.layers.activation_checkpointing import repeated_layers
from app.layers.attention.requirements import dropouts_of
from app.layers.recurrent import recurrent_mixers

# by device: the language, the environment variable that names a compiler, and those that are looked for
_COMPILERS = {"cpu": ("C++", "CXX", ("g++", "clang++", "c++")), "cuda": ("C", "CC", ("gcc", "clang"))}


def machine_obstacles(config: CompileConfig, device: torch.device) -> Iterator[Obstacle]:
    """Yield what this machine lacks."""
    if config.graphs and device.type != "cuda":
        reason = f"compile.graphs=true records kernels of an NVIDIA GPU, and this run is on {device.type}"
        yield Obstacle(reason, "Set compile.graphs=false.")
    if config.backend != "inductor":
        return
    if device.type == "cuda" and find_spec("triton") is None:
        yield Obstacle("the package triton is not installed", "Install it, or set compile=none.")
    language, variable, names = _COMPILERS.get(device.type, _COMPILERS["cpu"])
    if variable not in os.environ and not any(map(shutil.which, names)):
        reason = f"no {language} compiler was found ({' or '.join(names)})"
        yield Obstacle(reason, f"Install {names[0]}, or set compile=none.")


def model_obstacles(lm: Any) -> Iterator[Obstacle]:
    """Yield dropouts of attention weights, and layers that depend on others; `lm` may be on meta."""
    shared = getattr(lm.config.get_text_config(), "num_kv_shared_layers", 0)
    if shared:
        reason = f"{shared} layers read keys and values of earlier layers (num_kv_shared_layers in config.json)"
        yield Obstacle(reason, "Set compile=none.")
    for name, rate in dropouts_of(lm).items():
        key = f"model.architecture.{name}"
        yield Obstacle(
            f"{key}={rate:g}: compiled layers have no dropout of attention weights",
            f"Set compile=none, or {key}=0 (of pretrained weights: {name} in the config.json of model.path).",
        )


def attention_obstacles(attention: str, device: torch.device, some_batch: Callable[[], Batch]) -> Iterator[Obstacle]:
    """Yield attention that one graph cannot compute for all batches of the run."""
    if attention == "sdpa" and device.type != "cpu":
        batch = some_batch()
        if batch.documents is not None and not batch.documents.are_longest(batch.ids.numel()):
            yield Obstacle(
                "attention=sdpa on a GPU makes one call for each document where their lengths differ",
                "Set attention=varlen (or flash), or compile=none.",
            )


def product_flops(lm: Any, *, trains_all: bool) -> float:
    """Return the FLOPs per token, forward and backward, of matrix products in the layers that can be compiled.

    Of a frozen weight the gradient of its input takes as many as its product, of a trained one its own as well.
    """
    numbers = lm.config.get_text_config()
    experts = getattr(numbers, "num_experts_per_tok", None) or 1
    layers = (layer for layer in repeated_layers(lm) if not recurrent_mixers(layer))
    used = 0.0
    for each in (weight for layer in layers for weight in layer.parameters() if weight.ndim > 1):
        used += each.numel() * (min(1.0, experts / len(each)) if each.ndim > 2 else 1.0)
    return 2 * (3 if trains_all else 2) * used
