"""Settings of a measurement as plain data for another process, and the benchmark models.

This module imports only the standard library, so that it works before packages are installed, and never torch, whose
memory would count toward the peak of child processes.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Settings of one measurement; all except `framework` and `turn` are the same for all contenders."""

    framework: str  # a key of FRAMEWORKS, or ours:key=value,key=value
    model: str  # a key of SHAPES
    method: str  # lora, qlora or full
    device: str  # cpu or cuda
    precision: str  # fp32 or bf16
    mix: str  # a key of MIXES
    length: int  # maximum document length
    tokens_per_step: int
    accumulation: int  # micro-batches per step
    steps: int  # measured steps, after `warm_up` others
    warm_up: int
    seed: int
    threads: int
    recompute: bool
    rank: int  # of adapters
    peak_tflops: float | None  # of this device, if it is missing in the table
    profile: bool = False  # one more step with torch's profiler
    settings: tuple[str, ...] = ()  # overrides for all contenders
    turn: int = 0

    @property
    def bin_tokens(self) -> int:
        return self.tokens_per_step // self.accumulation

    def of(self, framework: str, turn: int) -> "Contest":
        return replace(self, framework=framework, turn=turn)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def contest_of(text: str) -> Contest:
    """Read the JSON of `Contest.as_json`."""
    values: dict[str, Any] = json.loads(text)
    return Contest(**{**values, "settings": tuple(values["settings"])})


# Models as overrides, always with random weights: nothing is downloaded.
METHODS = ("lora", "qlora", "full")


def _llama(**numbers: int | str) -> list[str]:
    return ["model=llama", *(f"model.architecture.{name}={value}" for name, value in numbers.items())]


SHAPES: dict[str, list[str]] = {
    "tiny": ["model=tiny"],
    "small": [  # four layers with matrix products large enough to dominate a step on a CPU
        "model=tiny",
        "model.architecture.hidden_size=512",
        "model.architecture.intermediate_size=1408",
        "model.architecture.num_attention_heads=8",
        "model.architecture.num_key_value_heads=8",
        "model.architecture.max_position_embeddings=4096",
    ],
    "llama_1b": _llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings="true"),
    "llama_8b": _llama(),
    "llama_70b": _llama(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}


def run_of(contest: Contest, settings: tuple[str, ...] = ()) -> "RunConfig":
    """Return the configuration for all contenders; `settings` are those of a variant of ours."""
    from app.config.load import compose_run

    chosen = [
        f"recipe={contest.method}",
        *SHAPES[contest.model],
        "model.weights=random",
        "optimizer=adamw",
        f"precision={contest.precision}",
        f"seed={contest.seed}",
        f"dataset.max_length={contest.length}",
        f"batching.tokens={contest.bin_tokens}",
        f"batching.accumulation={contest.accumulation}",
        f"training.recompute={str(contest.recompute).lower()}",
        f"launch.threads={contest.threads}",
    ]
    if contest.method != "full":
        chosen += [f"adapter.r={contest.rank}", f"adapter.alpha={2 * contest.rank}"]
    return compose_run(_last_settings([*chosen, *contest.settings, *settings]))


def _last_settings(settings: list[str]) -> list[str]:
    """Return the last setting of each key; Hydra rejects two values of one group."""
    return list({text.partition("=")[0]: text for text in settings}.values())


def environment(device: str, threads: int) -> dict[str, str]:
    """Return the environment of a measuring process: offline, number of threads, and no visible GPU on a CPU."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **hidden,
    }
