"""What app.export can be told: a run, what to make of it and where, and where its files lie now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.fields import choice, number
from app.config.finished import Changes, changed, finished_folder, plain, read_changes, settled
from app.config.load import checked, read_run
from app.config.schema import RunConfig
from app.errors import ConfigError

MAY_CHANGE = (
    *("run", "to", "kind", "dtype", "shard_gb", "cache_dir", "launch.threads", "model.path"),
    *("dataset.path", "dataset.eval_path", "dataset.eval_fraction"),
)
WHY_NOT = {"": "because an export writes down what the run made; only its files may lie elsewhere"}

# the certificate takes the rows that the run held out one by one, through plain attention; the template lies in final/
_OVER = {
    "resume": None,
    "dry_run": False,
    "checkpoint.final": "last",
    "eval.patience": 0,
    "eval.rows": 1,
    "batching.packing": False,
    "attention.kind": "sdpa",
    "launch.num_processes": 1,
    "model.chat_template": None,
    "tracker.kind": "none",
}
_OF_MERGED = ("dtype", "shard_gb")


@dataclass(kw_only=True, slots=True)
class ExportConfig(RunConfig):
    """The run as it is exported. `dtype` and `shard_gb` (the largest file) are of `kind=merged`."""

    run: str
    to: str
    kind: str = choice("adapter", "merged")
    dtype: str = choice("bf16", "fp16", "fp32", default="bf16")
    shard_gb: float = number(5.0, above=0)

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.run).expanduser()

    @property
    def target(self) -> Path:
        """Where the export is to be."""
        return Path(self.to).expanduser().absolute()


def export_config(arguments: Sequence[str], choices_of: Callable[[Path], Mapping[str, Any]]) -> ExportConfig:
    """From the command line; `choices_of` says what was chosen for the machine when the run in a folder was made."""
    changes = read_changes(arguments, ExportConfig, MAY_CHANGE, WHY_NOT)
    folder = finished_folder(changes.values.get("run"))
    kept = {name: kind for name, kind in choices_of(folder).items() if name == "precision"}
    own = plain(settled(read_run(folder / "run.yaml"), kept))
    given = {**_OVER, "model.tokenizer": str(folder / "final"), **changes.values}
    config = checked(changed(own, Changes(changes.choices, given)), ExportConfig)
    problems = _problems(config, changes)
    if problems:
        raise ConfigError(problems)
    return config


def _problems(config: ExportConfig, changes: Changes) -> list[str]:
    """What does not go together."""
    whole, problems = config.adapter.kind == "none", []
    if config.kind == "adapter" and whole:
        problems.append(
            f"kind=adapter: run={config.run} tuned a whole model and has no adapter. Give kind=merged: its weights "
            f"in dtype={config.dtype}."
        )
    problems += [
        f"{key}={changes.values[key]} would change nothing: an adapter is exported as it is. Leave it out, or give "
        "kind=merged."
        for key in _OF_MERGED
        if config.kind == "adapter" and key in changes
    ]
    if "model.path" in changes and (whole or config.model.weights == "random"):
        kept = "tuned a whole model, and that is in final/" if whole else "keeps its base of random weights"
        problems.append(f"model.path={config.model.path} would not be read: this run {kept}.")
    return problems
