"""What app.evaluate can be told: a run, and on top of its run.yaml what may be otherwise when it is scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.config.dataset_schema import DatasetConfig
from app.config.fields import choice, number
from app.config.finished import Changes, changed, finished_folder, plain, read_changes, settled
from app.config.load import checked, read_run
from app.config.schema import RunConfig
from app.errors import ConfigError

MAY_CHANGE = (
    *("run", "weights", "output_dir", "cache_dir", "dataset", "attention", "precision"),
    *("batching.packing", "batching.tokens", "eval.rows", "launch.threads", "launch.num_processes"),
    *("model.path", "model.chat_template", "harness", "harness_limit", "harness_chat"),
)
_WEIGHTS = "because the weights are those of the run; weights=tuned, base or both chooses between them"
WHY_NOT = {
    "": "because an evaluation trains nothing",
    "batching.rows": "eval.rows is the number of rows in a micro-batch of an evaluation",
    **dict.fromkeys(("model", "adapter", "quantization", "recipe", "experiment"), _WEIGHTS),
}

# meant for the time of the training, and in the way of an evaluation; the chat template lies in final/
_OVER = {
    "resume": None,
    "dry_run": False,
    "checkpoint.final": "last",
    "eval.patience": 0,
    "launch.num_processes": 1,
    "model.chat_template": None,
}
_SOURCE = ("path", "mix", "split", "hub_config", "revision")
_HELD_OUT: Mapping[str, Any] = {"eval_path": None, "eval_split": None, "eval_fraction": 0.0}
_LIMITS: Mapping[str, Any] = {"max_rows": None, "eval_max_rows": None}


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(RunConfig):
    """The run as it is scored. `output_dir` is where evaluate.json goes: the folder of the run, unless given."""

    run: str
    weights: str = choice("tuned", "base", "both", default="tuned")
    harness: list[str] = field(default_factory=list)  # tasks of lm-evaluation-harness, instead of rows
    harness_limit: int | None = number(None, at_least=1)  # rows of each task
    harness_chat: bool = False  # its questions through the chat template

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.run).expanduser()


def evaluate_config(
    arguments: Sequence[str], choices_of: Callable[[Path], Mapping[str, Any]]
) -> EvaluateConfig:
    """From the command line; `choices_of` says what was chosen for the machine when the run in a folder was made."""
    changes = read_changes([_listed(text) for text in arguments], EvaluateConfig, MAY_CHANGE, WHY_NOT)
    folder = finished_folder(changes.values.get("run"))
    # the kernel of attention may be another on this machine: only precision decides the number
    kept = {name: kind for name, kind in choices_of(folder).items() if name == "precision"}
    own = plain(settled(read_run(folder / "run.yaml"), kept))
    given = {**_OVER, "output_dir": str(folder), "model.tokenizer": str(folder / "final"), **changes.values}
    data = changed(own, Changes(changes.choices, given))
    if changes.values.get("harness"):
        _require_harness_alone(changes)
    else:
        data["dataset"] = _rows_to_score(own["dataset"], data["dataset"], changes)
    config = checked(data, EvaluateConfig)
    _require_tasks_for_text(config)
    _require_known_bins(config)
    if "model.path" in changes:
        _require_base_by_path(config)
    return config


def holds_out(dataset: DatasetConfig) -> bool:
    """Whether the rows to score are a part that is held out, or named for it."""
    return any(getattr(dataset, name) != nothing for name, nothing in _HELD_OUT.items())


def _listed(text: str) -> str:
    """`harness=a,b` would be a sweep."""
    key, _, value = text.partition("=")
    return f"{key}=[{value}]" if key == "harness" and value and value[0] not in "[\"'" else text


def _require_harness_alone(changes: Changes) -> None:
    idle = [
        key
        for key in (*changes.choices, *changes.values)
        if key.partition(".")[0] in {"dataset", "batching", "attention"} or key == "launch.num_processes"
    ]
    if idle:
        raise ConfigError(
            f"{' and '.join(idle)} would change nothing: the tasks of harness= bring rows of their own, asked by one "
            f"process with transformers' own attention. Leave {'it' if len(idle) == 1 else 'them'} out."
        )


def _require_known_bins(config: EvaluateConfig) -> None:
    if config.batching.tokens == "auto":
        raise ConfigError(
            "batching.tokens=auto is found for training; an evaluation gives the same numbers with any bins. "
            f"Give batching.tokens={max(config.model.suggest.tokens, config.dataset.max_length)}, or leave it out."
        )


def _require_tasks_for_text(config: EvaluateConfig) -> None:
    if not config.harness and (config.harness_limit is not None or config.harness_chat):
        raise ConfigError(
            "harness_limit and harness_chat say how tasks are asked, and there are none. Give harness=TASK."
        )
    if config.harness and config.task.kind != "causal":
        raise ConfigError(
            f"harness={','.join(config.harness)}: its tasks are for models that write text, and this run was tuned "
            f"with task={config.task.kind}. Leave harness out."
        )


def _require_base_by_path(config: EvaluateConfig) -> None:
    if config.model.weights == "random":
        raise ConfigError(
            f"model.path={config.model.path} would not be read: the base of this run had random weights."
        )
    if config.adapter.kind == "none" and config.weights == "tuned":
        raise ConfigError(
            f"model.path={config.model.path} would not be read: this run tuned a whole model, and that is in final/. "
            "Its base is scored with weights=base or weights=both."
        )


def _rows_to_score(own: dict[str, Any], given: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The rows that the run held out; of another dataset those that it names for evaluation, else all.

    What holds rows out or limits them belongs to the dataset that it was given for, not to the next one.
    """
    typed = {name for name in (*_HELD_OUT, *_LIMITS) if f"dataset.{name}" in changes}
    if "dataset" in changes.choices:
        another = any(own[name] != given.get(name) for name in _SOURCE)
        forgotten: dict[str, Any] = {"eval_fraction": 0.0} if another else {}
    elif any(own[name] != given[name] for name in (*_SOURCE, *_HELD_OUT)):
        forgotten = {**_HELD_OUT, **_LIMITS}
    else:
        _require_held_out(own, changes)
        forgotten = {}
    if "dataset.path" in changes and own["mix"]:
        forgotten = {**forgotten, "mix": {}}  # other rows in the place of a mix
    rows = {**given, **{name: nothing for name, nothing in forgotten.items() if name not in typed}}
    if "max_rows" in typed and (rows.get("eval_path") or rows.get("eval_split")):
        raise ConfigError(
            f"dataset.max_rows={given['max_rows']} limits the rows that a run trains on. Of those that are scored "
            f"here, dataset.eval_max_rows={given['max_rows']} takes the first."
        )
    return rows


def _require_held_out(own: Mapping[str, Any], changes: Changes) -> None:
    nothing_held = all(own[name] == nothing for name, nothing in _HELD_OUT.items())
    if nothing_held and "dataset.path" not in changes:
        raise ConfigError(
            f"run={changes.values['run']}: it held no rows out. Give dataset.path=FILE with rows to score "
            + (
                ""
                if own["path"] is None
                else f"(dataset.path={own['path']} scores those that it was trained on)."
            )
        )
