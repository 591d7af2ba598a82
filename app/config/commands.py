"""Command startup and exit codes; options of finetune generate, finetune report and finetune check."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from app.config import conf_files
from app.config.arguments import split_arguments
from app.config.command_line import Changes, Command
from app.config.finished_run import checkpoint_problems
from app.config.help import print_help_or_version
from app.config.kinds import QUANTIZATION_KINDS
from app.config.load import compose_run
from app.config.overrides import key_of
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.config.validate import did_you_mean, number, parse_section
from app.errors import AppError, ConfigError, EnvironmentProblem, refuse
from app.safe_text import safe_text

AMPERE = (8, 0)  # the first with bf16 and tf32, and required by FlashAttention and Triton kernels
_MIN_FP8_CAPABILITY = (8, 9)  # Ada, Hopper or newer
_OF_AMPERE = {"bf16", "tf32", "varlen", "flash"}  # kinds of precision and attention


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """GPU specification."""

    name: str  # file name in conf/hardware
    label: str  # name in texts
    names: list[str] = field(default_factory=list)  # names reported by the driver
    memory_gib: float = number(above=0)  # memory of the GPU in GiB
    bandwidth_gb: float = number(above=0)  # memory bandwidth in GB/s
    shares_host: bool = False  # whether the GPU has no memory of its own, but shares that of the CPU
    bf16_tflops: float | None = number(None, above=0)  # dense bf16 peak in TFLOP/s; null: not supported or unknown
    fp16_tflops: float | None = number(None, above=0)  # dense fp16 peak in TFLOP/s; null: that of bf16
    tf32_tflops: float | None = number(None, above=0)  # dense tf32 peak in TFLOP/s; null: not supported or unknown
    fp32_tflops: float | None = number(None, above=0)  # fp32 peak without tensor cores in TFLOP/s; null: unknown
    fp8_tflops: float | None = number(None, above=0)  # dense fp8 peak in TFLOP/s; null: no fp8
    capability: str | None = None  # CUDA compute capability, e.g. 8.9
    context_gib: float | None = number(None, at_least=0)  # memory of the CUDA context in GiB; null: not measured

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores support fp8 in CUDA."""
        return self.capability is not None and self._version >= _MIN_FP8_CAPABILITY

    @property
    def before_ampere(self) -> bool:
        """Whether it is an NVIDIA GPU without bf16, tf32, FlashAttention and Triton kernels."""
        return self.capability is not None and self._version < AMPERE

    @property
    def _version(self) -> tuple[int, int]:
        major, _, minor = str(self.capability).partition(".")
        return int(major), int(minor or 0)


def hardware_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `hardware` section of the options `hardware=` and `hardware.KEY=`; empty for the local machine."""
    changes = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("hardware.")}
    name = options.get("hardware", "auto")
    if name != "auto":
        return {"hardware": {"name": name, **conf_files.read_choice("hardware", name), **changes}}
    if changes:
        raise ConfigError(
            f"hardware.{next(iter(changes))} needs hardware=NAME. Choose one of {', '.join(hardware_names())}."
        )
    return {}


def all_hardware() -> list[HardwareConfig]:
    """Return all GPUs of conf/hardware."""
    of_names = ({"name": name, **conf_files.read_choice("hardware", name)} for name in hardware_names())
    return [parse_section(HardwareConfig, facts, "hardware.") for facts in of_names]


def hardware_names() -> list[str]:
    """Return the names of the files without `auto`."""
    return [name for name in conf_files.choices_by_group()["hardware"] if name != "auto"]


def missing_hardware_support(run: RunConfig, hardware: HardwareConfig) -> list[str]:
    """Return problems of a run that needs features that this GPU lacks."""
    problems = [
        f"{section}={kind} needs an NVIDIA GPU of compute capability 8.0 or higher (Ampere or newer), and "
        f"hardware={hardware.name} has {hardware.capability}. Set {section}={other}, or leave {section} out."
        for section, kind, other in (
            ("precision", run.precision.kind, "fp16"),
            ("attention", run.attention.kind, "sdpa"),
        )
        if hardware.before_ampere and kind in _OF_AMPERE
    ]
    if not QUANTIZATION_KINDS[run.quantization.kind].needs_fp8 or hardware.has_fp8:
        return problems
    fp8_names = ", ".join(gpu.name for gpu in all_hardware() if gpu.has_fp8)
    capability = "none" if hardware.capability is None else hardware.capability
    alternatives = " or ".join(name for name, kind in QUANTIZATION_KINDS.items() if not (kind.needs_fp8 or kind.trains))
    return [
        *problems,
        f"quantization.kind={run.quantization.kind} needs an NVIDIA GPU of compute capability 8.9 or higher, and "
        f"hardware={hardware.name} has {capability}. Set quantization={alternatives}, or choose one of {fp8_names}.",
    ]


# ---- commands


STDIN = "-"  # value of prompts= that reads standard input
_UNSUPPORTED_SYSTEMS = {
    "Darwin": "macOS is not supported: use a Linux machine.",
    "Windows": "Windows is not supported: install WSL 2 (wsl --install) and run this inside it.",
}


def require_platform(system: str = "", machine: str = "") -> None:
    """Raise an error on any platform except Linux on x86-64 or aarch64; the arguments are for tests."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux":
        raise EnvironmentProblem(_UNSUPPORTED_SYSTEMS.get(system, f"{system} is not supported: use a Linux machine."))
    if machine not in ("x86_64", "aarch64"):
        raise EnvironmentProblem(f"Linux on {machine} is not supported: use x86-64 or aarch64.")


def run_command(
    command: Callable[[Sequence[str]], int],
    help_text: Callable[[Sequence[str]], str],
    on_error: Callable[[AppError], None] | None = None,
) -> NoReturn:
    """Run `command` on the arguments and exit with its code, or that of an AppError, which is passed to `on_error`."""
    try:
        if print_help_or_version(sys.argv[1:], help_text):
            sys.exit(0)
        require_platform()
        sys.exit(command(sys.argv[1:]))
    except AppError as problem:
        if on_error is not None:
            on_error(problem)
        sys.stderr.write(f"{problem.report()}\n")
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def print_settings_notes(notes: Iterable[str]) -> None:
    """Print lines on the settings of `from=FILE` to standard error, because `--cfg job` prints YAML."""
    sys.stderr.writelines(f"{safe_text(note)}\n" for note in notes)


# ---- finetune generate


@dataclass(kw_only=True, slots=True)
class ThreadsConfig:
    """CPU threads of a single-process command."""

    threads: int | None = number(None, at_least=1, at_most=1024)  # CPU threads; null: the default of torch


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """Options of finetune generate; without `prompt` and `prompts` it starts a chat."""

    run: str | None = None  # output_dir of a finished run
    checkpoint: str | None = None  # best, or a step number
    model: str | None = None  # instead of run: folder, hub ID or model name of finetune train
    prompt: str | None = None  # one prompt
    second: str | None = None  # second text of a pair, for runs that classify pairs
    prompts: str | None = None  # file with prompts (.jsonl, .json, .csv, .txt), or - for JSON lines on standard input
    output: str | None = None  # file for the answers to prompts=
    system: str | None = None  # system message of the conversation
    adapter: bool = True  # false: answer with the base model, for comparison
    # run code from the model's repository; typed as in finetune train
    trust_remote_code: bool = False
    chat: bool | None = None  # apply the chat template; null: as in training, for a model if it has one
    max_new_tokens: int = number(256, at_least=1)  # longest answer
    temperature: float = number(0.0, at_least=0)  # sampling temperature; 0: greedy decoding
    top_p: float = number(1.0, above=0, at_most=1)  # sample from the most likely tokens with this total probability
    top_k: int | None = number(None, at_least=1)  # sample from the K most likely tokens
    beams: int = number(1, at_least=1)  # beams of beam search
    batch: int = number(8, at_least=1)  # prompts answered at once
    seed: int = number(0, at_least=0, at_most=2**32 - 1)  # seed of sampling
    launch: ThreadsConfig = field(default_factory=ThreadsConfig)

    @property
    def sampling(self) -> dict[str, float | int | bool]:
        """Arguments for `generate` of transformers."""
        if self.temperature == 0:
            return {"do_sample": False, "num_beams": self.beams}
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "num_beams": self.beams}
        return {**drawn, "top_k": 0 if self.top_k is None else self.top_k}


def _generate_problems(config: GenerateConfig, _changes: Changes) -> Iterator[str]:
    if config.run is None and config.model is None:
        yield "run= is required, e.g. run=runs/mine, or model=DIR or a hub ID."
    if config.run is not None and config.model is not None:
        yield f"run={config.run} and model={config.model} both select a model. Keep one."
    yield from checkpoint_problems(config.checkpoint)
    if config.checkpoint is not None and config.run is None:
        yield f"checkpoint={config.checkpoint} needs run=DIR. Set it, or leave checkpoint out."
    if config.prompt is not None and config.prompts is not None:
        yield f"prompt and prompts={config.prompts} both set the prompt. Keep one."
    if config.second is not None and config.prompt is None:
        yield "second is the second text of a pair. Set prompt=TEXT for the first, or leave second out."
    if config.output is not None and config.prompts in (None, STDIN):
        yield f"output={config.output} needs prompts=FILE. Set it, or leave output out."
    if config.model is not None and not config.adapter:
        yield f"adapter=false: model={config.model} has no adapter. Leave adapter out."
    if config.temperature == 0 and (config.top_p < 1 or config.top_k is not None):
        yield (
            "top_p and top_k have no effect with temperature=0 (greedy decoding). "
            "Set temperature=0.7, or leave them out."
        )
    if config.beams > 1 and config.prompt is None and config.prompts is None:
        yield (
            f"beams={config.beams} is not supported in a chat, because beam search cannot stream. "
            "Set prompt=TEXT or prompts=FILE, or leave beams out."
        )


GENERATE = Command(
    schema=GenerateConfig, rules=_generate_problems, typed_as={"model.trust_remote_code": "trust_remote_code"}
)


def class_problems(config: GenerateConfig, folder: str, pair: bool, task: str = "classification") -> Iterator[str]:
    """Yield problems with options that do not apply to a model that predicts labels."""
    beams = config.beams if config.beams > 1 else None
    options = {"system": config.system, "chat": config.chat, "temperature": config.temperature or None, "beams": beams}
    unused = [key for key, value in options.items() if value is not None]
    if unused:
        yield (
            f"{' and '.join(unused)} would have no effect: run={folder} was trained with task={task} and predicts "
            "labels. Leave it out."
        )
    if config.prompt is None and config.prompts is None:
        yield (
            f"prompt= is required. Set prompt=TEXT or prompts=FILE: run={folder} was trained with task={task}, "
            "which predicts labels and cannot chat."
        )
    if config.prompt is not None and pair != (config.second is not None):
        words = "also set second=TEXT" if pair else "leave second out"
        yield f"run={folder} was trained on {'text pairs' if pair else 'single texts'}: {words}."


# ---- finetune report


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """Options of finetune report: one of `run`, `sweep` and `runs`; `to` is the output file."""

    run: str | None = None  # folder of a run
    sweep: str | None = None  # folder of a sweep
    runs: str | None = None  # folders of the runs to compare, separated by commas
    to: str | None = None  # HTML file; by default report.html in the folder, or comparison.html

    @property
    def folders(self) -> list[tuple[str, Path]]:
        """The folders with their options."""
        named = [("run", self.run), ("sweep", self.sweep)]
        named += [("runs", text) for text in folders_in(self.runs or "")]
        return [(f"{key}={text}", Path(text).expanduser()) for key, text in named if text is not None]

    @property
    def target(self) -> Path:
        """Output file: in the folder of the run or sweep; for several runs in the current folder."""
        if self.to is not None:
            return Path(self.to).expanduser()
        return Path("comparison.html") if self.runs is not None else self.folders[0][1] / "report.html"


def folders_in(text: str) -> list[str]:
    """Split a list at its commas, except inside existing folder names: folders of trials contain commas."""
    parts = text.split(",")
    folders = []
    while parts:
        lengths = range(len(parts), 0, -1)
        size = next((n for n in lengths if Path(",".join(parts[:n])).expanduser().is_dir()), 1)
        folders.append(",".join(parts[:size]))
        parts = parts[size:]
    return [folder for folder in folders if folder]


def _report_problems(config: ReportConfig, _changes: Changes) -> Iterator[str]:
    named = {"run": config.run, "sweep": config.sweep, "runs": config.runs}
    options = [f"{key}={text}" for key, text in named.items() if text is not None]
    if not options:
        yield "run= is required, e.g. run=DIR, sweep=DIR or runs=DIR1,DIR2."
    if len(options) > 1:
        yield f"{' and '.join(options)} both select a report. Keep one."
    if config.runs and len(folders_in(config.runs)) < 2:
        yield f"runs={config.runs}: a comparison needs at least two folders. For one run set run=DIR."


REPORT = Command(schema=ReportConfig, rules=_report_problems)


# ---- finetune check

CHECKS = ("data", "memory", "cluster", "quantization", "models")
_DEFAULT_CHECKS = ("data", "memory")
_CHECKS_WITHOUT_ROWS = ("quantization", "models")  # need no rows, so the sample dataset does not have to match the task


@dataclass(kw_only=True, slots=True)
class AnswersConfig:
    """Generation to estimate memory for."""

    rows: int = number(8, at_least=1)  # rows per batch
    length: int | None = number(None, at_least=2)  # tokens per row with its prompt; null: dataset.max_length
    beams: int = number(1, at_least=1)  # beams of beam search


@dataclass(kw_only=True, slots=True)
class CheckOptions:
    """Options of finetune check. Without `hardware`, check this machine."""

    hardware: HardwareConfig | None = None
    exact: bool = False  # memory: trace every layer, not one of each kind
    answers: AnswersConfig | None = None
    rows: int = number(0, at_least=0)  # quantization: samples of the dataset to run the model on


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """Checks, and the run to check with its overrides. Without `folder`, nothing is written."""

    checks: tuple[str, ...]
    run: RunConfig
    folder: Path | None
    overrides: tuple[str, ...]
    options: CheckOptions
    notes: tuple[str, ...]  # on the settings of `from=FILE`


CHECK = Command(schema=CheckOptions, allowed=("",))


def check_config(arguments: Sequence[str]) -> CheckConfig:
    """Read the command line of finetune check; raise one ConfigError with all problems."""
    checks, rest = _split_check_names(arguments)
    overrides, switches, notes = split_arguments(rest)
    if switches:
        raise ConfigError(f"{' '.join(switches)} is an option of finetune train. Leave it out.")
    typed = CHECK.read(overrides)
    refuse(_misplaced_options([text for text in overrides if text not in typed.words], checks))
    data = {key: value for key, value in typed.data.items() if key != "hardware"}
    options = CHECK.validated(data | hardware_facts(typed.options), typed.options)
    reads_rows = checks[0] not in _CHECKS_WITHOUT_ROWS or options.rows or "dataset" in map(_section_of, typed.words)
    rows = [] if reads_rows else ["dataset=auto", "dataset.path=rows", "dataset.max_length=64"]
    run = compose_run([*rows, *typed.words])
    folder = Path(run.output_dir).expanduser() if "output_dir" in map(key_of, typed.words) else None
    problems = [] if options.hardware is None else missing_hardware_support(run, options.hardware)
    if options.answers is not None and not task_of(run.task).writes_text:
        problems.append(f"answers: task={run.task.kind} does not generate text. Leave it out, or set task=causal.")
    refuse(problems)
    return CheckConfig(checks, run, folder, tuple(typed.words), options, tuple(notes))


def _misplaced_options(options: Sequence[str], checks: Sequence[str]) -> Iterator[str]:
    """Yield the problems of options of other checks."""
    for text in options:
        check = "quantization" if key_of(text) == "rows" else "memory"
        if check not in checks:
            yield f"{text} is an option of finetune check {check}. Leave it out."


def _section_of(text: str) -> str:
    return key_of(text).partition(".")[0]


def _split_check_names(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split the arguments into the checks named by the first one, and the rest."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("-", "~")):
        return _DEFAULT_CHECKS, list(arguments)
    word = arguments[0]
    if word not in CHECKS:
        suggestion = did_you_mean(word, CHECKS, listing=False)
        raise ConfigError(
            f"Unknown check {word!r}.{suggestion} Choose one of {', '.join(CHECKS)}; "
            f"the default is {' and '.join(_DEFAULT_CHECKS)}."
        )
    return (word,), list(arguments[1:])
