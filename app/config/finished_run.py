"""Configuration of a finished run, with the changes that app.evaluate and app.reproduce allow."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from app.config.command_line import Changes, Command
from app.config.dataset import WITHOUT_HELD_OUT_ROWS, has_held_out_rows
from app.config.dataset_schema import DatasetConfig
from app.config.fields import choice, number
from app.config.load import apply_changes, read_run
from app.config.schema import AttentionConfig, RunConfig
from app.config.tasks import TASKS
from app.errors import CheckpointError, ConfigError, refuse
from app.files import read_json, require_intact

_TYPES = {"starts": list, "choices": dict, "hashes": dict, "counts": dict}


def finished_folder(given: str | None, checkpoint: str | None = None) -> Path:
    """Return the folder named by `run=`; refuse a run that has not finished, unless a `checkpoint` is asked for."""
    folder = run_folder(given)
    if (folder / "sweep.json").is_file():
        raise CheckpointError(f"run={given}: this is the folder of a sweep. Give that of one of its trials, inside it.")
    if checkpoint is None and not (folder / "final").is_dir():
        raise CheckpointError(
            f"run={given}: there is no final/ in it, so the run did not finish. "
            f"Finish it with python -m app.train ... {shlex.quote(f'output_dir={given}')} resume=auto"
        )
    return folder


def run_folder(given: str | None) -> Path:
    """The folder of `run=`, which must exist."""
    if given is None:
        raise ConfigError("run has no value. Give run=DIR, the output_dir of a run.")
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"run={given}: there is no such folder. Give the output_dir of a finished run.")
    return folder


def require_intact_final(run: Path) -> None:
    """Refuse a run whose final/ has a file that differs from what was written."""
    require_intact(run / "final", "Train it again, or restore it from a copy of the run.")


def with_recorded_choices(run: RunConfig, choices: Mapping[str, Any]) -> RunConfig:
    """The run with each `auto` as the `choices` of its manifest have it."""
    if run.precision.kind == "auto" and "precision" in choices:
        run = replace(run, precision=replace(run.precision, kind=choices["precision"]))
    if run.attention.kind == "auto" and "attention" in choices:
        run = replace(run, attention=AttentionConfig(kind=choices["attention"]))
    if run.compile.kind == "auto" and "compile" in choices:
        budget = choices.get("memory_budget", run.compile.memory_budget)
        run = replace(run, compile=replace(run.compile, kind=choices["compile"], memory_budget=budget))
    # on a CPU the number of threads may change the last bits
    if run.launch.threads is None and choices.get("device") == "cpu":
        run = replace(run, launch=replace(run.launch, threads=choices.get("threads")))
    return run


def as_run(config: RunConfig) -> RunConfig:
    """The run without the keys of a command."""
    return RunConfig(**{each.name: getattr(config, each.name) for each in fields(RunConfig)})


@dataclass(kw_only=True, slots=True)
class FinishedRunConfig(RunConfig):
    """Options of a command about the run in the folder `run`."""

    run: str

    @property
    def folder(self) -> Path:
        return Path(self.run).expanduser()


CHECKPOINT = {"checkpoint": "kept_checkpoint"}  # a run has a section of that name

# keys of the training alone; the chat template lies in final/, with its options
_NOT_FOR_A_FINISHED_RUN: Mapping[str, Any] = {
    "resume": None,
    "dry_run": False,
    "checkpoint.final": "last",
    "eval.patience": 0,
    "eval.objective": "eval_loss",
    "eval.also": None,
    "launch.num_processes": 1,
    "model.add_tokens": [],
    "model.chat_template": None,
    "model.template_options": {},
}


def checkpoint_problems(checkpoint: str | None) -> Iterator[str]:
    """Problems with `checkpoint=`."""
    if checkpoint not in (None, "best") and not str(checkpoint).isdecimal():
        yield f"checkpoint={checkpoint}: expected best or a number of steps, such as checkpoint=100."


def own_files(folder: Path) -> dict[str, Any]:
    """The tokenizer and the chat template lie in final/, if the run finished."""
    if (folder / "final").is_dir():
        return {**_NOT_FOR_A_FINISHED_RUN, "model.tokenizer": str(folder / "final")}
    return {key: value for key, value in _NOT_FOR_A_FINISHED_RUN.items() if not key.startswith("model.")}


def with_recorded_precision(folder: Path) -> RunConfig:
    """The run with its recorded precision; the attention kernel may differ on this machine, without changing scores."""
    choices = read_manifest(folder / "manifest.json").get("choices", {})
    precision = {name: kind for name, kind in choices.items() if name == "precision"}
    return with_recorded_choices(read_run(folder / "run.yaml"), precision)


def read_manifest(path: Path) -> dict[str, Any]:
    """Content of a manifest.json; empty if there is none."""
    if not path.exists():
        return {}
    try:
        manifest: dict[str, Any] = read_json(path)
    except ValueError as fault:
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: {fault}.") from fault
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: it has no names.")
    odd = [name for name, kind in _TYPES.items() if not isinstance(manifest.get(name, kind()), kind)]
    if odd:
        raise CheckpointError(f"{path} cannot be read as the manifest of a run: its {odd[0]} are of another type.")
    return manifest


# ---- app.evaluate

_WEIGHTS = "because the weights are those of the run; weights=tuned, base or both chooses between them"
_EVALUATE_ALLOWED = (
    *("output_dir", "cache_dir", "dataset", "attention", "precision"),
    *("batching.packing", "batching.tokens", "eval.rows", "launch.threads", "launch.num_processes"),
    *("model.path", "model.chat_template", "model.template_options", "model.trust_remote_code"),
)
_EVALUATE_WHY_NOT = {
    "": "because an evaluation trains nothing",
    "batching.rows": "eval.rows is the number of rows in a micro-batch of an evaluation",
    **dict.fromkeys(("model", "adapter", "quantization", "recipe", "experiment"), _WEIGHTS),
}
_SOURCE = ("path", "mix", "split", "hub_config", "revision")
_LIMITS: Mapping[str, Any] = {"max_rows": None, "eval_max_rows": None}


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(FinishedRunConfig):
    """Options of app.evaluate. evaluate.json goes to `output_dir`, the folder of the run unless given."""

    weights: str = choice("tuned", "base", "both", default="tuned")
    kept_checkpoint: str | None = None  # best, or a number of steps; typed as checkpoint=N
    harness: list[str] = field(default_factory=list)  # tasks of lm-evaluation-harness, in place of rows
    harness_limit: int | None = number(None, at_least=1)  # rows of each task
    harness_chat: bool = False  # asks through the chat template


def evaluate_config(arguments: Sequence[str]) -> EvaluateConfig:
    """Read the command line of app.evaluate."""
    typed = EVALUATE.read(arguments)
    folder = finished_folder(typed.options.get("run"), typed.options.get("kept_checkpoint"))
    run = with_recorded_precision(folder)
    over = {**own_files(folder), "output_dir": str(folder)}
    data = apply_changes(run, typed.settings, over) | typed.data
    if typed.options.get("harness"):
        refuse(_harness_problems(typed.settings))
    else:
        data["dataset"] = _rows_to_score(run.dataset, data["dataset"], typed.changes)
    return EVALUATE.validated(data, typed.changes)


def _harness_problems(changes: Changes) -> Iterator[str]:
    of_rows = {"dataset", "batching", "attention"}
    idle = [key for key in changes if key.partition(".")[0] in of_rows or key == "launch.num_processes"]
    if idle:
        yield (
            f"{' and '.join(idle)} would change nothing: the tasks of harness= bring rows of their own, asked by one "
            f"process with transformers' own attention. Leave {'it' if len(idle) == 1 else 'them'} out."
        )


def _evaluate_problems(config: EvaluateConfig, changes: Changes) -> Iterator[str]:
    yield from checkpoint_problems(config.kept_checkpoint)
    if config.kept_checkpoint is not None and config.weights == "base":
        yield f"checkpoint={config.kept_checkpoint}: weights=base reads no weights of the run. Leave one of them out."
    if not config.harness and (config.harness_limit is not None or config.harness_chat):
        yield "harness_limit and harness_chat say how tasks are asked, and there are none. Give harness=TASK."
    if config.harness and not TASKS[config.task.kind].writes_text:
        yield (
            f"harness={','.join(config.harness)}: its tasks are for models that write text, and this run was tuned "
            f"with task={config.task.kind}. Leave harness out."
        )
    if config.batching.tokens == "auto":
        yield (
            "batching.tokens=auto is found for training; an evaluation gives the same numbers with any bins. "
            f"Give batching.tokens={max(config.model.suggest.tokens, config.dataset.max_length)}, or leave it out."
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
    """Problems with a given `model.path` that nothing would read."""
    if "model.path" not in changes:
        return
    if config.model.weights == "random":
        yield f"model.path={config.model.path} would not be read: the base of this run had random weights."
    elif config.adapter.kind == "none" and not needs_base:
        yield (
            f"model.path={config.model.path} would not be read: this run tuned a whole model, and that is in final/. "
            "Its base is scored by app.evaluate with weights=base or weights=both."
        )


def _rows_to_score(own_dataset: DatasetConfig, given: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The dataset section to score: rows that the run held out; of another dataset its held-out rows, else all.

    Keys that hold rows out or limit them belong to the dataset that they were given for.
    """
    own = asdict(own_dataset)
    typed_in = {name for name in (*WITHOUT_HELD_OUT_ROWS, *_LIMITS) if f"dataset.{name}" in changes}
    forgotten: dict[str, Any] = {}
    if "dataset" in changes:
        if any(own[name] != given.get(name) for name in _SOURCE):
            forgotten = {"eval_fraction": 0.0}
    elif any(own[name] != given[name] for name in (*_SOURCE, *WITHOUT_HELD_OUT_ROWS)):
        forgotten = {**WITHOUT_HELD_OUT_ROWS, **_LIMITS}
    elif "dataset.path" not in changes and not has_held_out_rows(own_dataset):
        trained_on = f"(dataset.path={own['path']} scores those that it was trained on)."
        raise ConfigError(
            f"run={changes['run']}: it held no rows out. Give dataset.path=FILE with rows to score "
            + ("" if own["path"] is None else trained_on)
        )
    if "dataset.path" in changes and own["mix"]:
        forgotten["mix"] = {}
    rows = {**given, **{name: nothing for name, nothing in forgotten.items() if name not in typed_in}}
    if "max_rows" in typed_in and (rows.get("eval_path") or rows.get("eval_split")):
        raise ConfigError(
            f"dataset.max_rows={given['max_rows']} limits the rows that a run trains on. Of those that are scored "
            f"here, dataset.eval_max_rows={given['max_rows']} takes the first."
        )
    return rows


# ---- app.reproduce

_REPRODUCE_ALLOWED = (
    *("output_dir", "attention", "precision", "launch.threads", "launch.num_processes"),
    *("cache_dir", "dataset.path", "dataset.mix", "dataset.eval_path", "dataset.leave_out"),
    *("model.path", "model.tokenizer", "model.chat_template", "model.trust_remote_code"),
)
_REPRODUCE_WHY_NOT = {"": "because a run is reproduced with its own settings; only its files may lie elsewhere"}


@dataclass(kw_only=True, slots=True)
class ReproduceConfig(FinishedRunConfig):
    """Options of app.reproduce. `tolerance` is relative; 0 asks for the same bits."""

    steps: int | None = number(None, at_least=1)
    tolerance: float = number(0.0, at_least=0)
    anyway: bool = False


REPRODUCE = Command(schema=ReproduceConfig, allowed=_REPRODUCE_ALLOWED, why_not=_REPRODUCE_WHY_NOT)


def reproduce_config(arguments: Sequence[str]) -> ReproduceConfig:
    """Read the command line of app.reproduce."""
    typed = REPRODUCE.read(arguments)
    folder = run_folder(typed.options.get("run"))
    choices = read_manifest(folder / "manifest.json").get("choices", {})
    run = with_recorded_choices(read_run(folder / "run.yaml"), choices)
    # a run that began at a checkpoint of another run begins there again; a resumed run begins at step 0
    resume = run.resume
    if resume == "auto" or (resume and Path(resume).expanduser().resolve().is_relative_to(folder.resolve())):
        resume = None
    over = {"output_dir": f"{folder.resolve()}-reproduced", "resume": resume, "dry_run": False, "tracker.kind": "none"}
    return REPRODUCE.validated(apply_changes(run, typed.settings, over) | typed.data, typed.changes)
