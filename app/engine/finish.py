"""The end of a run: the weights as files, the result, and what to do next."""

import shutil
import sys
from pathlib import Path

from app.config.schema import RunConfig
from app.engine.checkpoint import Checkpoints, load_weights
from app.engine.files import whole_folder
from app.engine.ground import Ground
from app.engine.loop import Loop
from app.engine.progress import Progress
from app.model.save import save_model
from app.model.trainee import Trainee
from app.record.before_after import before_after
from app.record.follower import Follower
from app.record.record import Record


def finish(
    run: RunConfig, ground: Ground, loop: Loop, record: Record | Follower, stopped_by: int | None
) -> int:
    """Write what came out; returns the exit code."""
    parts, progress = loop.parts, loop.progress
    known = {
        "objective": progress.last_loss if progress.best_loss is None else progress.best_loss,
        "steps": progress.step,
        "train_loss_first": progress.first_loss,
        "train_loss_last": progress.last_loss,
        "eval_loss": progress.last_eval_loss,
        "tokens_per_second": loop.tokens_per_second,
        "peak_memory_bytes": parts.runtime.peak_memory_bytes(),
    }
    if stopped_by is not None:
        record.message(
            f"stopped after step {progress.step}, which is saved. Go on with the same command and "
            f"output_dir={record.folder.path} resume=auto"
        )
        record.finish("stopped", **known)
        return stopped_by
    if run.checkpoint.final == "best":
        _take_best(parts.checkpoints, progress, parts.stepper.trainee, record)
    if parts.runtime.rank == 0:
        with whole_folder(record.folder.final) as aside:
            save_model(parts.stepper.trainee, ground.tokenizer, aside)
        answers = before_after(record.folder.samples)
        if answers:
            record.message(answers)
    what = "model" if run.adapter.kind == "none" else "adapter"
    record.message(_closing_words(what, record, known, progress))
    record.finish("finished", final=str(record.folder.final), **known)
    return 0


def _take_best(
    checkpoints: Checkpoints, progress: Progress, trainee: Trainee, record: Record | Follower
) -> None:
    save = checkpoints.best(progress)
    if save is None or progress.best_step == progress.step:
        return
    load_weights(save, trainee.trained())
    record.message(f"final/ has the weights of step {progress.best_step}, the best evaluation")


def _closing_words(
    what: str, record: Record | Follower, known: dict[str, float | None], progress: Progress
) -> str:
    speed = known["tokens_per_second"]
    evaluated = "" if progress.last_eval_loss is None else f", eval loss {progress.last_eval_loss:.4f}"
    return (
        f"done    {progress.step} steps, loss {progress.first_loss:.4f} -> {progress.last_loss:.4f}{evaluated}, "
        f"{speed:,.0f} tokens/s\n"
        f"{what:<7} {record.folder.final}\n"
        f'try it  {_python()} -m app.generate run={record.folder.path} prompt="..."'
    )


def _python() -> str:
    """As it must be typed here: the program's interpreter need not be the one of the shell."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path.cwd()
    own = Path(sys.executable)
    return str(own.relative_to(here)) if own.is_relative_to(here) else str(own)
