"""A machine with less memory than this one: a device where large micro-batches do not fit, a host of few bytes.

    python -m tests.harness.scarcity WORDS...       finetune train, with the limits of the environment

The device: TOKENS: how many a micro-batch may have; WHERE: forward, backward or recomputed; RANKS: which processes
("01"); CALLS: attention layers that still fit at the beginning, whatever their size. The host: MEMORY_BYTES.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WHERE = ("forward", "backward", "recomputed")


@dataclass
class Scarce:
    """How often memory did not suffice."""

    times: int = 0
    calls: int = 0

    def out(self) -> None:
        self.times += 1
        raise torch.OutOfMemoryError("CUDA out of memory (not really)")


@contextmanager
def scarce(where: str, tokens: int, calls: int = 0) -> Iterator[Scarce]:
    """Every Llama of this process; put back at the end.

    The call is limited, not `forward`: a module of a run may have a forward of its own.
    """
    from transformers.models.llama.modeling_llama import LlamaAttention

    attention: Any = LlamaAttention
    memory = Scarce()
    attention.__call__ = _limited(attention.__call__, where, tokens, calls, memory)
    try:
        yield memory
    finally:
        del attention.__call__


def _limited(own: Callable[..., Any], where: str, tokens: int, calls: int, memory: Scarce) -> Any:
    def call(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        memory.calls += 1
        again = torch._C._current_graph_task_id() != -1  # within a backward pass
        short = memory.calls > calls and hidden_states[..., 0].numel() > tokens
        if short and where == ("recomputed" if again else "forward"):
            memory.out()
        out, *rest = own(self, hidden_states, *args, **kwargs)
        if short and where == "backward" and out.requires_grad:
            out.register_hook(lambda _gradient: memory.out())
        return out, *rest

    return call


def main() -> None:
    """A run on a scarce machine."""
    from app import train
    from app.memory import estimate

    given = os.environ
    if "MEMORY_BYTES" in given:
        vars(estimate)["host_bytes"] = lambda: int(given["MEMORY_BYTES"])
    if given.get("RANK", "0") not in given.get("RANKS", ""):
        train.main()
        return
    with scarce(given["WHERE"], int(given["TOKENS"]), int(given["CALLS"])):
        train.main()


if __name__ == "__main__":
    main()
