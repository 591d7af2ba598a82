"""What app.reproduce can be told: a run, and where its files lie now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.fields import number
from app.config.finished import Changes, changed, plain, read_changes, run_folder, settled
from app.config.load import checked, read_run
from app.config.schema import RunConfig

MAY_CHANGE = (
    *("run", "output_dir", "steps", "tolerance", "anyway", "attention", "precision", "launch.threads"),
    *("cache_dir", "dataset.path", "dataset.mix", "dataset.eval_path"),
    *("model.path", "model.tokenizer", "model.chat_template"),
)
WHY_NOT = {"": "because a run is reproduced with its own settings; only its files may lie elsewhere"}


@dataclass(kw_only=True, slots=True)
class ReproduceConfig(RunConfig):
    """The run as it is run again. `tolerance` is relative: 0 asks for the same bits."""

    run: str
    steps: int | None = number(None, at_least=1)
    tolerance: float = number(0.0, at_least=0)
    anyway: bool = False

    @property
    def folder(self) -> Path:
        """Of the run that is reproduced."""
        return Path(self.run).expanduser()


def reproduce_config(
    arguments: Sequence[str], choices_of: Callable[[Path], Mapping[str, Any]]
) -> ReproduceConfig:
    """From the command line; `choices_of` says what was chosen for the machine when the run in a folder was made."""
    changes = read_changes(arguments, ReproduceConfig, MAY_CHANGE, WHY_NOT)
    folder = run_folder(changes.values.get("run"))
    own = plain(settled(read_run(folder / "run.yaml"), choices_of(folder)))
    given = {
        "output_dir": f"{folder.resolve()}-reproduced",
        "resume": _beginning(own["resume"], folder),
        "dry_run": False,
        "tracker.kind": "none",  # its curves are there already
        **changes.values,
    }
    return checked(changed(own, Changes(changes.choices, given)), ReproduceConfig)


def _beginning(resume: str | None, folder: Path) -> str | None:
    """A run that began at a checkpoint of another begins there again; one that was stopped begins at the beginning."""
    if resume in (None, "auto") or Path(resume).expanduser().resolve().is_relative_to(folder.resolve()):
        return None
    return resume
