"""What is measured: one framework on one workload. Plain data, so that another process can be told; no torch here."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Everything that one measurement depends on; all but `framework` and `turn` is the same for all contenders."""

    framework: str  # a name of FRAMEWORKS, or ours:key=value,key=value
    model: str  # a key of SHAPES
    method: str  # lora, qlora or full
    device: str  # cpu or cuda
    precision: str  # fp32 or bf16
    mix: str  # a key of MIXES
    length: int  # no document is longer
    tokens_per_step: int
    accumulation: int  # micro-batches of a step
    steps: int  # measured, after `warm_up` others
    warm_up: int
    seed: int
    threads: int
    recompute: bool
    rank: int  # of adapters
    peak_tflops: float | None  # of this device, where the table does not know it
    settings: tuple[str, ...] = ()  # overrides of the configuration that all contenders share
    turn: int = 0

    @property
    def bin_tokens(self) -> int:
        """Of one micro-batch."""
        return self.tokens_per_step // self.accumulation

    def of(self, framework: str, turn: int) -> "Contest":
        """The same for one of the contenders."""
        return replace(self, framework=framework, turn=turn)

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def contest_of(text: str) -> Contest:
    """What `as_json` wrote."""
    told: dict[str, Any] = json.loads(text)
    return Contest(**{**told, "settings": tuple(told["settings"])})
