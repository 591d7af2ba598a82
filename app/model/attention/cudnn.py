"""cuDNN's attention to documents of any lengths: one of the two kernels behind torch's own variable-length attention.

From torch 2.15 on the operation is told which kernel to take, call by call, so nothing global is switched. Before, the
choice is wired shut, and rightly: down to 2.11 the gradient is sized by the width of a head instead of the longest
document (pytorch/pytorch#186142) and writes past its buffer, which ends the process. So nothing here opens it there.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.errors import ConfigError
from app.model.attention.dense import sdpa
from app.model.attention.ragged import cannot, gpu_lacking, refusals, require_rules, side_by_side, window_of
from app.model.attention.rules import Kernel, Needs, Rules

_GENERATIONS = (9, 10)  # Hopper, Blackwell of data centres
_CUDNN = 91800
_LARGEST_HEAD = 128
_SHORTEST = 129  # what cuDNN before 9.24 must be told at least as the longest document


def requires(device: torch.device) -> list[str]:
    """The words name what to install."""
    version = torch.backends.cudnn.version() or 0
    found = f"{version // 10000}.{version // 100 % 100}" if version else "missing"
    return [
        *_gpu(device),
        *([] if _operation() else [f"torch 2.15 or newer (this is {torch.__version__})"]),
        *([] if version >= _CUDNN else [f"cuDNN 9.18 or newer (here it is {found})"]),
    ]


def refuses(needs: Needs) -> list[str]:
    """Everything beyond shared heads."""
    windows = ["sliding windows"] if needs.window else []
    return [*refusals(needs, largest=_LARGEST_HEAD), *windows]


def cudnn(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """With the operation of this torch."""
    return bound(q.device)(q, k, v, rules, documents)


def kernel_of(operation: Callable[..., Any], chosen: int) -> Kernel:
    """Bound to the operation and to how it is told; padded rows go to `sdpa`, one call for them too.

    Keys and values are repeated for the query heads that share them: torch's own choice refuses this kernel where heads
    are shared, so nobody stands for what it would compute.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is None:
            return sdpa(q, k, v, rules, None)
        require_rules("cudnn", rules)
        if window_of(rules, documents.max_seqlen)[0] >= 0:
            raise ConfigError(cannot("cudnn", ["sliding windows"]))
        bounds, longest = documents.cu_seqlens, max(documents.max_seqlen, _SHORTEST)

        def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
            return operation(
                query,
                *(_for_each_head(each, query.shape[1]) for each in (key, value)),
                cu_seq_q=bounds,
                cu_seq_k=bounds,
                max_q=longest,
                max_k=longest,
                is_causal=rules.causal,
                scale=rules.scale,
                window_size=[-1, 0 if rules.causal else -1],
                backend=chosen,
            )

        return side_by_side(call, q, k, v)

    return run


def _for_each_head(tokens: Tensor, heads: int) -> Tensor:
    """[T, H, D] with as many heads; the gradient is summed over those that share one."""
    shared = heads // tokens.shape[1]
    return tokens if shared == 1 else tokens.repeat_interleave(shared, dim=1)


def _gpu(device: torch.device) -> list[str]:
    wanted = ["an NVIDIA GPU of the Hopper or Blackwell generation (compute capability 9 or 10)"]
    if gpu_lacking(device):
        return wanted
    return [] if torch.cuda.get_device_capability(device)[0] in _GENERATIONS else wanted


@cache
def bound(_device: torch.device) -> Kernel:
    """To the function of this torch."""
    operation = _operation()
    assert operation is not None, "`requires` is asked before"
    return kernel_of(operation, _number())


def _number() -> int:
    """How the operation's argument `backend` names cuDNN."""
    from torch.nn.attention import SDPBackend

    return int(SDPBackend.CUDNN_ATTENTION.value)


def _operation() -> Callable[..., Any] | None:
    """None where it cannot be told which kernel to take."""
    try:
        import_module("torch.nn.attention.varlen")  # defines it
        operation: Any = torch.ops.torch_attn._varlen_attn
        arguments = operation.default._schema.arguments
    except (ImportError, AttributeError):
        return None
    return operation if any(argument.name == "backend" for argument in arguments) else None
