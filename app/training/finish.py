"""The end of a run: the weights as files, the result, and what to do next."""

from collections import deque

from app.config.commands import python
from app.config.schema import RunConfig
from app.distributed.fsdp import whole_tensors
from app.distributed.process_group import HostGroup
from app.files import checksummed_folder
from app.model.save import save_model, saved_tensors
from app.model.training_model import TrainingModel
from app.tracking.formatting import format_bytes
from app.tracking.recorder import Recorder, samples_table
from app.training.checkpoint import Checkpoints, Progress
from app.training.memory import Predicted
from app.training.resolve import ResolvedRun
from app.training.trained_state import load_weights
from app.training.trainer import Trainer


def finish(
    run: RunConfig, resolved: ResolvedRun, loop: Trainer, record: Recorder, predicted: Predicted | None
) -> int:
    """Write what came out; returns the exit code."""
    parts, progress, known = loop.parts, loop.progress, _known(loop, predicted)
    if run.checkpoint.final == "best":
        _take_best(parts.checkpoints, progress, parts.stepper.trainee, record, parts.runtime.peers)
    trainee = parts.stepper.trainee
    tensors = None if trainee.sharding is None else whole_tensors(saved_tensors(trainee))
    if parts.runtime.rank == 0:
        with checksummed_folder(record.folder.final) as aside:
            save_model(trainee, resolved.tokenizer, aside, tensors)
        answers = samples_table(record.folder.samples)
        if answers:
            record.message(answers)
    else:
        deque(tensors or (), maxlen=0)  # what the first process writes is gathered by all
    what = "model" if run.adapter.kind == "none" else "adapter"
    record.message(_closing_words(what, record, known, loop))
    record.finish("finished", final=str(record.folder.final), **known)
    return 0


def stop(loop: Trainer, record: Recorder, predicted: Predicted | None) -> int:
    """The same for a run that was asked to stop, and has saved."""
    record.message(f"stopped after step {loop.progress.step}, which is saved.")
    record.finish("stopped", **_known(loop, predicted))
    assert loop.stopped_by is not None
    return loop.stopped_by


def _known(loop: Trainer, predicted: Predicted | None) -> dict[str, float | None]:
    """What the lines of this start tell; a start that had nothing left to do has no speed of its own."""
    progress, peers = loop.progress, loop.parts.runtime.peers
    measured = int(
        peers.highest(loop.memory.bytes or 0)
    )  # each process may have its own share of what is divided
    speed = {"tokens_per_second": loop.tokens_per_second} if loop.tokens_per_second else {}
    return {
        **speed,
        "objective": progress.last_loss if progress.best_loss is None else progress.best_loss,
        "steps": progress.step,
        "train_loss_first": progress.first_loss,
        "train_loss_last": progress.last_loss,
        "eval_loss": progress.last_eval_loss,
        "peak_memory_bytes": loop.parts.runtime.peak_memory_bytes(),
        "memory_predicted_bytes": None if predicted is None else predicted.bytes,
        "memory_measured_bytes": measured or None,
    }


def _take_best(
    checkpoints: Checkpoints, progress: Progress, trainee: TrainingModel, record: Recorder, peers: HostGroup
) -> None:
    save = checkpoints.best(progress)
    if save is None or progress.best_step == progress.step:
        return
    load_weights(save, trainee.trained(), peers)
    record.message(f"final/ has the weights of step {progress.best_step}, the best evaluation")


def _closing_words(what: str, record: Recorder, known: dict[str, float | None], loop: Trainer) -> str:
    progress, speed = loop.progress, known.get("tokens_per_second")
    evaluated = "" if progress.last_eval_loss is None else f", eval loss {progress.last_eval_loss:.4f}"
    if loop.scores is not None and loop.scores.of_classes:
        evaluated += f", accuracy {loop.scores.token_accuracy:.2%}, macro F1 {loop.scores.macro_f1:.2%}"
    return (
        f"{_memory_words(known)}"
        f"done    {progress.step} steps, loss {progress.first_loss:.4f} -> {progress.last_loss:.4f}{evaluated}"
        f"{f', {speed:,.0f} tokens/s' if speed else '; nothing was left to do'}\n"
        f"{what:<7} {record.folder.final}\n"
        f'try it  {python()} -m app.generate run={record.folder.path} prompt="..."'
    )


def _memory_words(known: dict[str, float | None]) -> str:
    predicted, measured = known["memory_predicted_bytes"], known["memory_measured_bytes"]
    if predicted is None or measured is None:
        return ""
    difference = measured / predicted - 1
    return f"memory  {format_bytes(predicted)} predicted, {format_bytes(measured)} measured ({difference:+.1%})\n"
