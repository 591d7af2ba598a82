"""What kernels that take all documents in one call have in common: what they need and refuse, layout and window.

They take the tokens of all documents one after another, [T, H, D], in 16-bit numbers, and where each document begins.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.errors import ConfigError
from app.model.attention.rules import Needs, Rules

_AMPERE = (8, 0)
_LARGEST_HEAD = 256
_HALVES = (torch.bfloat16, torch.float16)


def gpu_lacking(device: torch.device) -> list[str]:
    """What of the hardware is missing, in words."""
    ampere = "an NVIDIA GPU of the Ampere generation or newer"
    if device.type != "cuda" or torch.version.cuda is None:
        return [ampere]
    return [] if torch.cuda.get_device_capability(device) >= _AMPERE else [ampere]


def refusals(
    needs: Needs, *, softcap: bool = False, dropout: bool = False, largest: int = _LARGEST_HEAD
) -> list[str]:
    """What of a run's needs such a kernel cannot do, in words; the keywords say what this one can."""
    size = needs.key_size
    asked = {
        "padded rows (batching.packing=false)": not needs.packed,
        "float32 arithmetic (precision=fp32 or tf32)": needs.compute not in _HALVES,
        "soft-capping": needs.softcap and not softcap,
        "attention sinks": needs.sinks,
        "dropout of attention weights": needs.dropout and not dropout,
        f"heads of {size} numbers (multiples of 8 up to {largest})": size % 8 or size > largest,
        f"keys of {size} and values of {needs.value_size} numbers": size != needs.value_size,
    }
    return [words for words, wanted in asked.items() if wanted]


def require_rules(name: str, rules: Rules, *, softcap: bool = False, dropout: bool = False) -> None:
    """The last line: a kind may ask for what its configuration does not show."""
    asked = {
        "soft-capping": rules.softcap is not None and not softcap,
        "attention sinks": rules.sinks is not None,
        "dropout of attention weights": rules.dropout > 0 and not dropout,
    }
    wanted = [words for words, asks in asked.items() if asks]
    if wanted:
        raise ConfigError(cannot(name, wanted))


def cannot(name: str, wanted: list[str]) -> str:
    """The message about needs that a backend refuses."""
    return f"attention={name} cannot do {' and '.join(wanted)}, which this run asks for. Set attention=sdpa."


def window_of(rules: Rules, longest: int) -> tuple[int, int]:
    """How many tokens to the left and to the right of itself a query sees; -1 is all of them."""
    cuts = rules.window is not None and rules.window < longest
    left = rules.window - 1 if cuts and rules.window is not None else -1
    return left, 0 if rules.causal else left


def side_by_side(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`call` with q, k and v as [T, H, D]; its result as [1, H, T, D].

    Autocast does not know these kernels, and rotary embeddings or norms with float32 weights may have widened q and k.
    """
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    out = call(*(t.to(dtype)[0].transpose(0, 1) for t in (q, k, v)))
    out = out[0] if isinstance(out, tuple) else out  # some versions return their log-sum-exp too
    tokens: Tensor = out
    return tokens.transpose(0, 1)[None]


def accepts(function: Callable[..., Any], *names: str) -> bool:
    """Whether `function` has arguments of these names."""
    return set(names) <= set(inspect.signature(function).parameters)
