"""Configuration of a finished run, with the changes that evaluate, reproduce and export allow."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from app.config.adapters import ADAPTER, adapter_folder
from app.config.command_line import Changes, Command
from app.config.conf_files import as_number
from app.config.dataset import WITHOUT_HELD_OUT_ROWS, has_held_out_rows
from app.config.load import apply_changes, read_run
from app.config.schema import AttentionConfig, DatasetConfig, RunConfig
from app.config.tasks import TASKS, task_of
from app.config.validate import choice, format_value, number
from app.errors import AppError, CheckpointError, ConfigError, refuse
from app.files import read_json, require_intact
from app.program import resume_command

_TYPES = {"starts": list, "choices": dict, "hashes": dict, "counts": dict}


def finished_folder(run: str | None, checkpoint: str | None = None) -> Path:
    """Return the folder of `run=`; without a `checkpoint`, raise an error if the run has not finished."""
    folder = run_folder(run)
    if (folder / "sweep.json").is_file():
        raise CheckpointError(f"run={run}: this is the folder of a sweep. Give the folder of one of its trials.")
    if checkpoint is None and not (folder / "final").is_dir():
        raise CheckpointError(
            f"run={run}: no final/ found, so the run did not finish. "
            f"Finish it with finetune train ... {shlex.quote(f'output_dir={run}')} resume=auto"
        )
    return folder


def run_folder(run: str | None) -> Path:
    """Return the folder of `run=`, which must exist."""
    if run is None:
        raise ConfigError("run= is required, e.g. run=runs/mine")
    folder = Path(run).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"run={run}: no such folder. Give the output_dir of a finished run.")
    return folder


def require_intact_final(run: Path) -> None:
    """Raise an error if a file in final/ was changed after it was written."""
    require_intact(run / "final", "Train again, or restore the folder from a copy of the run.")


def with_recorded_choices(run: RunConfig, choices: Mapping[str, Any]) -> RunConfig:
    """Return the run with each `auto` replaced by the recorded `choices` of its manifest."""
    if run.precision.kind == "auto" and "precision" in choices:
        run = replace(run, precision=replace(run.precision, kind=choices["precision"]))
    if run.attention.kind == "auto" and "attention" in choices:
        run = replace(run, attention=AttentionConfig(kind=choices["attention"]))
    if run.compile.kind == "auto" and "compile" in choices:
        budget = choices.get("memory_budget", run.compile.memory_budget)
        run = replace(run, compile=replace(run.compile, kind=choices["compile"], memory_budget=budget))
    # on a CPU the thread count may change the last bits of results
    if run.launch.threads is None and choices.get("device") == "cpu":
        run = replace(run, launch=replace(run.launch, threads=choices.get("threads")))
    return run


def as_run(config: RunConfig) -> RunConfig:
    """Return the run without the options of the command."""
    return RunConfig(**{schema_field.name: getattr(config, schema_field.name) for schema_field in fields(RunConfig)})


@dataclass(kw_only=True, slots=True)
class FinishedRunConfig(RunConfig):
    """Options of a command for a run."""

    run: str  # output_dir of the run

    @property
    def folder(self) -> Path:
        return Path(self.run).expanduser()


CHECKPOINT = {"checkpoint": "kept_checkpoint"}  # `checkpoint` is already a section of a run

# keys used only in training; final/ contains the chat template and its options
_NOT_FOR_A_FINISHED_RUN: Mapping[str, Any] = {
    "resume": None,
    "dry_run": False,
    "checkpoint.final": "last",
    "eval.patience": 0,
    "eval.objective": "eval_loss",
    "eval.also": None,
    "launch.num_processes": 1,
    "parallel.context": 1,
    "model.add_tokens": [],
    "model.chat_template": None,
    "model.template_options": {},
}


def checkpoint_problems(checkpoint: str | None) -> Iterator[str]:
    """Yield problems with `checkpoint=`."""
    if checkpoint not in (None, "best") and not str(checkpoint).isdecimal():
        yield f"checkpoint={checkpoint}: expected best or a step number, e.g. checkpoint=100."


def final_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that point to the tokenizer and chat template in final/, if the run finished."""
    if (folder / "final").is_dir():
        return {**_NOT_FOR_A_FINISHED_RUN, "model.tokenizer": str(folder / "final")}
    return {key: value for key, value in _NOT_FOR_A_FINISHED_RUN.items() if not key.startswith("model.")}


def with_recorded_precision(folder: Path) -> RunConfig:
    """Return the run with its recorded precision; the attention backend may differ, as scores do not depend on it."""
    choices = read_manifest(folder / "manifest.json").get("choices", {})
    precision = {name: kind for name, kind in choices.items() if name == "precision"}
    return with_recorded_choices(read_run(folder / "run.yaml"), precision)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a manifest.json; empty if the file is missing."""
    if not path.exists():
        return {}
    try:
        manifest: dict[str, Any] = read_json(path)
    except ValueError as fault:
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: {fault}.") from fault
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: it is not an object.")
    invalid = [name for name, kind in _TYPES.items() if not isinstance(manifest.get(name, kind()), kind)]
    if invalid:
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: {invalid[0]} has the wrong type.")
    return manifest


def how_to_resume(run: Path) -> str:
    """Return the resume command of a run, to copy; empty if its manifest has no command line."""
    try:
        words = read_manifest(run / "manifest.json")["starts"][-1]["command_line"]
        typed = words[words.index("app.train") + 1 :]
    except (AppError, LookupError, TypeError, ValueError, AttributeError):
        return ""
    return f"\nTo resume:\n{resume_command(typed, str(run))}" if typed else ""


# ---- finetune evaluate

_WEIGHTS = "because the weights are those of the run; choose weights=tuned, base or both"
_EVALUATE_ALLOWED = (
    *("output_dir", "cache_dir", "dataset", "attention", "precision"),
    *("batching.packing", "batching.tokens", "eval.rows", "launch.threads", "launch.num_processes"),
    *("model.path", "model.chat_template", "model.template_options", "model.trust_remote_code"),
)
_EVALUATE_WHY_NOT = {
    "": "because it is for training only",
    "batching.rows": "because eval.rows is the eval micro-batch size",
    **dict.fromkeys(("model", "adapter", "quantization", "recipe", "experiment"), _WEIGHTS),
}
_SOURCE = ("path", "mix", "split", "hub_config", "revision")
_LIMITS: Mapping[str, Any] = {"max_rows": None, "sample": None, "eval_max_rows": None}


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(FinishedRunConfig):
    """Options of finetune evaluate. evaluate.json is written to `output_dir`, by default the run folder."""

    weights: str = choice("tuned", "base", "both", default="tuned")  # weights to score; both: also the difference
    kept_checkpoint: str | None = None  # best, or a step number
    harness: list[str] = field(default_factory=list)  # lm-evaluation-harness tasks, instead of rows
    harness_limit: int | None = number(None, at_least=1)  # rows per task
    harness_chat: bool = False  # apply the chat template to the prompts


def evaluate_config(arguments: Sequence[str]) -> EvaluateConfig:
    """Read the command line of finetune evaluate."""
    typed = EVALUATE.read(arguments)
    folder = finished_folder(typed.options.get("run"), typed.options.get("kept_checkpoint"))
    run = with_recorded_precision(folder)
    over = {**final_settings(folder), "output_dir": str(folder)}
    if typed.options.get("harness"):  # reads no rows
        over["dataset.transform"] = None
    data = apply_changes(run, typed.settings, over) | typed.data
    if typed.options.get("harness"):
        refuse(_harness_problems(typed.settings))
    else:
        data["dataset"] = _rows_to_score(run.dataset, data["dataset"], typed.changes)
    return EVALUATE.validated(data, typed.changes)


def _harness_problems(changes: Changes) -> Iterator[str]:
    of_rows = {"dataset", "batching", "attention"}
    unused = [key for key in changes if key.partition(".")[0] in of_rows or key == "launch.num_processes"]
    if unused:
        yield (
            f"{' and '.join(unused)} would have no effect: harness= uses the rows of its tasks, one process and the "
            f"attention of transformers. Leave {'it' if len(unused) == 1 else 'them'} out."
        )


def _evaluate_problems(config: EvaluateConfig, changes: Changes) -> Iterator[str]:
    yield from checkpoint_problems(config.kept_checkpoint)
    if config.kept_checkpoint is not None and config.weights == "base":
        yield f"checkpoint={config.kept_checkpoint} has no effect with weights=base. Leave one of them out."
    if not config.harness and (config.harness_limit is not None or config.harness_chat):
        yield "harness_limit and harness_chat need harness=TASK. Set it, or leave them out."
    if config.harness and not TASKS[config.task.kind].writes_text:
        yield (
            f"harness={','.join(config.harness)} needs a model that generates text, but this run was trained "
            f"with task={config.task.kind}. Leave harness out."
        )
    if config.batching.tokens == "auto":
        yield (
            "batching.tokens=auto is for training; the result of an evaluation does not depend on the bin size. "
            f"Set batching.tokens={max(config.model.suggest.tokens, config.dataset.max_length)}, or leave it out."
        )
    yield from unread_model_path(config, changes, needs_base=config.weights != "tuned")


EVALUATE = Command(
    schema=EvaluateConfig,
    rules=_evaluate_problems,
    allowed=_EVALUATE_ALLOWED,
    why_not=_EVALUATE_WHY_NOT,
    typed_as=CHECKPOINT,
)


def unread_model_path(config: FinishedRunConfig, changes: Changes, *, needs_base: bool) -> Iterator[str]:
    """Yield problems with a `model.path` that has no effect."""
    if "model.path" not in changes:
        return
    if config.model.weights == "random":
        yield f"model.path={config.model.path} has no effect: the base of this run was randomly initialized."
    elif config.adapter.kind == "none" and not needs_base:
        yield (
            f"model.path={config.model.path} has no effect: this run fine-tuned the whole model, which is in final/. "
            "To score its base, use finetune evaluate with weights=base or weights=both."
        )


def _rows_to_score(run_dataset: DatasetConfig, dataset: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return the dataset section to score: the run's eval set; for another dataset its held-out rows, else all rows.

    Keys that hold out or limit rows apply only to the dataset for which they were set.
    """
    recorded = asdict(run_dataset)
    typed_in = {name for name in (*WITHOUT_HELD_OUT_ROWS, *_LIMITS) if f"dataset.{name}" in changes}
    cleared: dict[str, Any] = {}
    if "dataset" in changes:
        if any(recorded[name] != dataset.get(name) for name in _SOURCE):
            cleared = {"eval_fraction": 0.0}
    elif any(recorded[name] != dataset[name] for name in (*_SOURCE, *WITHOUT_HELD_OUT_ROWS)):
        cleared = {**WITHOUT_HELD_OUT_ROWS, **_LIMITS}
    elif "dataset.path" not in changes and not has_held_out_rows(run_dataset):
        trained_on = f"(dataset.path={recorded['path']} scores the training rows)."
        raise ConfigError(
            f"run={changes['run']}: the run has no eval set. Set dataset.path=FILE with rows to score "
            + ("" if recorded["path"] is None else trained_on)
        )
    if "dataset.path" in changes and recorded["mix"]:
        cleared["mix"] = {}
    rows = {**dataset, **{name: nothing for name, nothing in cleared.items() if name not in typed_in}}
    limit = next((name for name in ("max_rows", "sample") if name in typed_in), None)
    if limit and (rows.get("eval_path") or rows.get("eval_split")):
        raise ConfigError(
            f"dataset.{limit}={dataset[limit]} limits the training rows. To score the first eval rows, "
            f"set dataset.eval_max_rows={dataset[limit]}."
        )
    return rows


# ---- finetune reproduce

_REPRODUCE_ALLOWED = (
    *("output_dir", "attention", "precision", "launch.threads", "launch.num_processes"),
    *("cache_dir", "dataset.path", "dataset.mix", "dataset.eval_path", "dataset.leave_out", "dataset.transform"),
    *("model.path", "model.tokenizer", "model.chat_template", "model.trust_remote_code"),
)
_REPRODUCE_WHY_NOT = {"": "because a run is reproduced with its own settings; only paths may differ"}


@dataclass(kw_only=True, slots=True)
class ReproduceConfig(FinishedRunConfig):
    """Options of finetune reproduce."""

    steps: int | None = number(None, at_least=1)  # compare only the first N steps
    tolerance: float = number(0.0, at_least=0)  # relative tolerance; 0: bitwise equality
    anyway: bool = False  # repeat the run even if versions or data differ


REPRODUCE = Command(schema=ReproduceConfig, allowed=_REPRODUCE_ALLOWED, why_not=_REPRODUCE_WHY_NOT)


def reproduce_config(arguments: Sequence[str]) -> ReproduceConfig:
    """Read the command line of finetune reproduce."""
    typed = REPRODUCE.read(arguments)
    folder = run_folder(typed.options.get("run"))
    choices = read_manifest(folder / "manifest.json").get("choices", {})
    run = with_recorded_choices(read_run(folder / "run.yaml"), choices)
    # start again from the checkpoint of another run, if the run did; a resumed run starts at step 0
    resume = run.resume
    if resume == "auto" or (resume and Path(resume).expanduser().resolve().is_relative_to(folder.resolve())):
        resume = None
    over = {"output_dir": f"{folder.resolve()}-reproduced", "resume": resume, "dry_run": False, "tracker.kind": "none"}
    return REPRODUCE.validated(apply_changes(run, typed.settings, over) | typed.data, typed.changes)


# ---- export settings


_EXPORT_ALLOWED = (
    *("cache_dir", "launch.threads", "model.path", "model.trust_remote_code"),
    *("dataset.path", "dataset.eval_path", "dataset.eval_fraction", "dataset.transform"),
)
_EXPORT_WHY_NOT = {"": "because an export uses the settings of the run; only paths may differ"}
# the export is verified on single held-out rows, with SDPA attention
_FOR_EXPORT = {"eval.rows": 1, "batching.packing": False, "attention.kind": "sdpa", "tracker.kind": "none"}


class ExportKind(NamedTuple):
    """Command-line requirements of an export kind."""

    needs_adapter: bool
    unused: Mapping[str, str] = {}  # keys without effect, with the reason
    quants: tuple[str, ...] = ()  # supported quants, the default first
    by_llama_cpp: tuple[str, ...] = ()  # quants that need llama_cpp=DIR
    packages: tuple[str, ...] = ()  # extra packages: one to write the export, others to verify it


COMPRESSED = ("fp8", "w8a8", "w4a16")  # quants in the format of compressed-tensors
EXPORT_KINDS = {
    "adapter": ExportKind(
        True, dict.fromkeys(("dtype", "shard_gb", "quant", "names"), "an adapter is exported unchanged")
    ),
    "merged": ExportKind(needs_adapter=False, unused={"quant": "merged weights have 16 or 32 bits"}),
    "quantized": ExportKind(
        needs_adapter=False,
        unused={"names": "it keeps the names of the base"},
        quants=("nf4", "fp4", "int8", *COMPRESSED),
    ),
    "gguf": ExportKind(
        needs_adapter=False,
        unused={
            "dtype": "quant sets the format of a GGUF file",
            "shard_gb": "a GGUF export is one file",
            "names": "GGUF defines its own names",
        },
        quants=("bf16", "f16", "q8_0", "q4_0"),
        by_llama_cpp=("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"),
        packages=("gguf", "xllamacpp"),
    ),
}
# sums of PEFT that prune to a density: A and B separately, or whole updates (svd)
_PRUNED = ("ties", "dare_ties", "dare_linear", "magnitude_prune")
PRUNING_SUMS = (*_PRUNED, *(f"{name}_svd" for name in _PRUNED))
_QUANTS = [quant for kind in EXPORT_KINDS.values() for quant in (*kind.quants, *kind.by_llama_cpp)]


@dataclass(kw_only=True, slots=True)
class ExportConfig(FinishedRunConfig):
    """Options of finetune export."""

    to: str  # new folder, or GGUF file
    kept_checkpoint: str | None = None  # best, or a step number
    kind: str = choice(*EXPORT_KINDS)  # format of the export
    dtype: str = choice("bf16", "fp16", "fp32", default="bf16")  # dtype of merged or unquantized weights
    # quantization format; auto: nf4 for kind=quantized, bf16 for kind=gguf
    quant: str = choice("auto", *_QUANTS, default="auto")
    llama_cpp: str | None = None  # folder of llama.cpp, whose programs write the GGUF file
    names: str = choice("whole", "text", default="whole")  # for multimodal models; text: export only the text model
    shard_gb: float = number(5.0, above=0)  # maximum size of a weight file in GB
    push: str | None = None  # USER/NAME: hub repository to upload the verified export to
    private: bool = True  # make a new `push` repository private
    adapters: list[str] = field(default_factory=list)  # adapters to sum, as RUN:FACTOR or FOLDER:FACTOR
    # sum of the updates; auto: svd if rank is set, else cat; others prune the adapters first, as in PEFT
    combine: str = choice("auto", "cat", "svd", "linear", *PRUNING_SUMS, default="auto")
    rank: int | None = number(None, at_least=1)  # rank of the sum, for svd and the methods that end in svd
    density: float | None = number(None, above=0, at_most=1)  # share of values that a pruning method keeps

    @property
    def factors(self) -> dict[str, float]:
        """Factor of each adapter; NaN if missing or invalid."""
        split = (text.rpartition(":") for text in self.adapters)
        return {name: math.nan if (read := as_number(factor)) is None else read for name, _, factor in split}

    @property
    def combination(self) -> str:
        """Method of combination, with `auto` resolved."""
        by_rank = "cat" if self.rank is None else "svd"
        return by_rank if self.combine == "auto" else self.combine

    @property
    def target(self) -> Path:
        return Path(self.to).expanduser().absolute()

    @property
    def packages(self) -> tuple[str, ...]:
        """Extra packages: one that the export needs, others to verify it."""
        if self.llama_cpp is not None:
            return ()
        return ("compressed_tensors",) if self.quant in COMPRESSED else EXPORT_KINDS[self.kind].packages

    def written(self, key: str) -> str | None:
        """Return the dtype or quant that weights are converted to; None if this kind ignores the key."""
        return None if key in EXPORT_KINDS[self.kind].unused else getattr(self, key)


def export_config(arguments: Sequence[str]) -> ExportConfig:
    """Read the command line of finetune export."""
    typed = EXPORT.read(arguments)
    folder = finished_folder(typed.options.get("run"), typed.options.get("kept_checkpoint"))
    run = with_recorded_precision(folder)
    over = {**final_settings(folder), **_FOR_EXPORT}
    config = EXPORT.validated(apply_changes(run, typed.settings, over) | typed.data, typed.changes)
    quants = EXPORT_KINDS[config.kind].quants
    return replace(config, quant=quants[0]) if config.quant == "auto" and quants else config


def _export_problems(config: ExportConfig, changes: Changes) -> Iterator[str]:
    kind = EXPORT_KINDS[config.kind]
    if kind.needs_adapter and config.adapter.kind == "none":
        yield (
            f"kind={config.kind}: run={config.run} fine-tuned the whole model and has no adapter. Set kind=merged "
            f"to export its weights in dtype={config.dtype}."
        )
    if kind.by_llama_cpp and not task_of(config.task).writes_text:
        yield f"kind={config.kind} is for models that generate text, not task={config.task.kind}. Set kind=merged."
    for key, reason in kind.unused.items():
        if key in changes:
            other = next(name for name, candidate in EXPORT_KINDS.items() if key not in candidate.unused)
            yield f"{key}={changes[key]} would have no effect: {reason}. Leave it out, or set kind={other}."
    if config.llama_cpp is not None and not kind.by_llama_cpp:
        yield f"llama_cpp={config.llama_cpp} is for GGUF files only. Leave it out, or set kind=gguf."
    elif config.quant in kind.by_llama_cpp and config.llama_cpp is None:
        yield f"quant={config.quant} needs llama.cpp. Set llama_cpp=DIR, its folder, or quant=q4_0."
    elif config.quant != "auto" and kind.quants and config.quant not in (*kind.quants, *kind.by_llama_cpp):
        yield f"quant={config.quant}: kind={config.kind} supports {', '.join(kind.quants)}. Choose one of these."
    if "private" in changes and config.push is None:
        yield f"private={changes['private']} needs push=USER/NAME. Set it, or leave private out."
    yield from unread_model_path(config, changes, needs_base=False)
    yield from checkpoint_problems(config.kept_checkpoint)
    yield from _combination_problems(config)


EXPORT = Command(
    schema=ExportConfig, rules=_export_problems, allowed=_EXPORT_ALLOWED, why_not=_EXPORT_WHY_NOT, typed_as=CHECKPOINT
)


def _combination_problems(config: ExportConfig) -> Iterator[str]:
    """Yield problems with `adapters`, `combine`, `rank` and `density`."""
    if not config.adapters:
        if config.combine != "auto" or config.rank is not None or config.density is not None:
            yield 'combine, rank and density need adapters to sum. Set adapters="[A:0.7,B:0.3]", or leave them out.'
        return
    setting = f"adapters=[{','.join(config.adapters)}]"
    if config.adapter.kind == "none":
        yield f"{setting}: run={config.run} fine-tuned the whole model and has no base for adapters. Set run=A."
    yield from _factor_problems(config, setting)
    if config.kept_checkpoint is not None:
        yield f"{setting}: checkpoint={config.kept_checkpoint} cannot be combined with adapters. Leave one out."
    if config.combination.endswith("svd") != (config.rank is not None):
        yield (
            f"combine={config.combine} rank={config.rank}: svd needs a rank, and only svd supports one. Set rank=32, "
            "or leave both out: cat sums exactly."
        )
    yield from _pruning_problems(config, setting)


def _pruning_problems(config: ExportConfig, setting: str) -> Iterator[str]:
    prunes, density = config.combination in PRUNING_SUMS, format_value(config.density)
    if prunes != (config.density is not None):
        yield (
            f"combine={config.combine} density={density}: {', '.join(PRUNING_SUMS)} need a density, and only they "
            "support one. Set density=0.5, or leave it out."
        )
    if prunes and len(config.factors) == 1:
        yield f"{setting}: combine={config.combine} compares adapters, so it needs at least two. Set combine=auto."


def _factor_problems(config: ExportConfig, setting: str) -> Iterator[str]:
    if len(config.factors) < len(config.adapters):
        yield f"{setting}: duplicate adapter. List it once, with the sum of its factors."
    for name, factor in config.factors.items():
        if not math.isfinite(factor):
            yield f"{setting}: each adapter needs a finite factor after a colon, e.g. {name or 'RUN'}:0.5."
        elif not (adapter_folder(name) / ADAPTER).is_file():
            yield f"{setting}: {name} has no {ADAPTER}. Give a run with an adapter, or the folder of an adapter."
    if not any(config.factors.values()):
        yield f"{setting}: all factors are 0. Set at least one to another value."
