"""What is measured: a contender on a workload, as plain data for another process; the models; the table of contenders.

No torch here: its memory would be counted as its children's peak.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from app.config.load import compose_run
from app.config.schema import RunConfig

if TYPE_CHECKING:
    from scripts.bench.loops import Contender


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


# Models as overrides of the configuration, always with random weights: nothing is downloaded.
METHODS = ("lora", "qlora", "full")


def _llama(**numbers: int | str) -> list[str]:
    return ["model=llama", *(f"model.architecture.{name}={value}" for name, value in numbers.items())]


SHAPES: dict[str, list[str]] = {
    "tiny": ["model=tiny"],
    "small": [  # four layers whose products are large enough to be most of a step on a CPU
        "model=tiny",
        "model.architecture.hidden_size=512",
        "model.architecture.intermediate_size=1408",
        "model.architecture.num_attention_heads=8",
        "model.architecture.num_key_value_heads=8",
        "model.architecture.max_position_embeddings=4096",
    ],
    "llama_1b": _llama(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings="true"
    ),
    "llama_8b": _llama(),
    "llama_70b": _llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}


def run_of(contest: Contest, settings: tuple[str, ...] = ()) -> RunConfig:
    """The configuration that all contenders follow; `settings` are those of one of our variants."""
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
    return compose_run(_last_of_each([*chosen, *contest.settings, *settings]))


def _last_of_each(settings: list[str]) -> list[str]:
    """What is told later replaces what was told before; Hydra would refuse two values of one group."""
    return list({text.partition("=")[0]: text for text in settings}.values())


TRL = "1.16.0"


@dataclass(frozen=True, slots=True)
class Framework:
    """`settings` are overrides of our configuration; `requires` says in words what is missing."""

    build: Callable[[Contest, tuple[str, ...]], "Contender"]
    requires: Callable[[Contest], list[str]] = lambda _contest: []
    settings: tuple[str, ...] = ()


def _ours(contest: Contest, settings: tuple[str, ...]) -> "Contender":
    from scripts.bench.loops import Ours, prepare

    return Ours(prepare(contest, settings))


def _plain(name: str) -> Callable[[Contest, tuple[str, ...]], "Contender"]:
    def build(contest: Contest, settings: tuple[str, ...]) -> "Contender":
        from scripts.bench import loops

        contender: Contender = getattr(loops, name)(loops.prepare(contest, settings))
        return contender

    return build


def _trl(name: str) -> Callable[[Contest, tuple[str, ...]], "Contender"]:
    def build(contest: Contest, settings: tuple[str, ...]) -> "Contender":
        from scripts.bench import with_trl
        from scripts.bench.loops import prepare

        contender: Contender = getattr(with_trl, name)(prepare(contest, settings))
        return contender

    return build


def _unsloth(contest: Contest, settings: tuple[str, ...]) -> "Contender":
    from scripts.bench.with_unsloth import Unsloth

    return Unsloth(contest, settings)


def _needs_trl(_contest: Contest) -> list[str]:
    try:
        found = version("trl")
    except PackageNotFoundError:
        return [f"TRL {TRL} (pip install -c constraints.txt -e '.[bench]')"]
    return [] if found == TRL else [f"TRL {TRL} (this is {found})"]


def _needs_liger(contest: Contest) -> list[str]:
    lacking = [] if contest.device == "cuda" else ["a GPU"]
    return [*_needs_trl(contest), *lacking, *_needs_package("liger_kernel")]


def _needs_unsloth(contest: Contest) -> list[str]:
    lacking = [] if contest.device == "cuda" else ["a GPU"]
    if contest.method == "full":
        lacking.append("adapters (--method lora or qlora)")
    return [*lacking, *_needs_package("unsloth")]


def _needs_package(name: str) -> list[str]:
    return [] if name in sys.modules or find_spec(name) else [f"the package {name}"]


FRAMEWORKS: dict[str, Framework] = {
    "ours": Framework(_ours),
    "ours_padded": Framework(_ours, settings=("batching.packing=false",)),
    "ours_recompute": Framework(_ours, settings=("training.recompute=true",)),
    "ours_sdpa": Framework(_ours, settings=("attention=sdpa",)),
    "ours_varlen": Framework(_ours, settings=("attention=varlen",)),
    "ours_flash": Framework(_ours, settings=("attention=flash",)),
    "ours_cudnn": Framework(_ours, settings=("attention=cudnn",)),
    "ours_compile": Framework(_ours, settings=("compile=blocks",)),
    "ours_unfused": Framework(_ours, settings=("adapter.fused=false",)),
    "ours_adamw_8bit": Framework(_ours, settings=("optimizer=adamw_8bit",)),
    "bare": Framework(_plain("bare")),
    "plain": Framework(_plain("packed")),
    "plain_padded": Framework(_plain("padded")),
    "trl": Framework(_trl("packed"), _needs_trl),
    "trl_padded": Framework(_trl("padded"), _needs_trl),
    "trl_default": Framework(_trl("default"), _needs_trl),
    "trl_fair": Framework(_trl("fair"), _needs_trl),
    "trl_liger": Framework(_trl("liger"), _needs_liger),
    "trl_fair_liger": Framework(_trl("fair_liger"), _needs_liger),
    "unsloth": Framework(_unsloth, _needs_unsloth),
}
_OWN_SETTINGS = "ours:"


def framework_of(name: str) -> Framework:
    """Of the table, or `ours:key=value,key=value`: ours with these switches set otherwise."""
    if name.startswith(_OWN_SETTINGS):
        return Framework(_ours, settings=tuple(name.removeprefix(_OWN_SETTINGS).split(",")))
    return FRAMEWORKS[name]


def is_framework(name: str) -> bool:
    """Whether `framework_of` knows it."""
    return name in FRAMEWORKS or (name.startswith(_OWN_SETTINGS) and "=" in name)
