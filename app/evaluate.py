"""Score a fine-tuned model, or its base, on the eval set or other rows.

finetune evaluate run=runs/mine                      the eval set of the run
finetune evaluate run=runs/mine dataset=messages dataset.path=new.jsonl
finetune evaluate run=runs/mine weights=both         the fine-tuned model and its base, compared
finetune evaluate run=runs/mine checkpoint=best      the best checkpoint, or a step number
finetune evaluate run=runs/mine harness=arc_easy     tasks of lm-evaluation-harness, if installed
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config.commands import run_command
from app.config.finished_run import EVALUATE, EvaluateConfig, as_run, evaluate_config, read_manifest
from app.config.help import command_help
from app.distributed.launch import fail_as_one_of_several, launch, processes_to_start, reporting_crashes, world
from app.errors import EnvironmentProblem, refuse
from app.evaluation.lm_eval import prepare_harness, require_harness, table, with_earlier_tasks
from app.files import report_write_errors, write_json
from app.tracking.console import Console, open_console
from app.tracking.formatting import align

# torch is imported inside functions, so that an error in the command line is reported at once


def score(config: EvaluateConfig, names: Sequence[str], console: Console) -> None:
    """Score rows with the models in `names` and write evaluate.json; other rows than the eval set get another name."""
    _check_parts(config)
    folder = _writable_folder(config.output_dir)
    console.say(f"run     {config.folder}, {' and '.join(names)}")
    from app.training.final_model import at_checkpoint

    with at_checkpoint(config.folder, config.kept_checkpoint, as_run(config)) as place:
        _score_in(place, config, names, folder, console)


def _score_in(place: Path, config: EvaluateConfig, names: Sequence[str], folder: Path, console: Console) -> None:
    """Score the run in `place`, and write the scores to `folder`."""
    from app.evaluation.compare import ModelComparison
    from app.evaluation.run import prepare_evaluation
    from app.tasks.table import counts_of

    manifest = read_manifest(config.folder / "manifest.json")
    hashes, recorded = manifest.get("hashes", {}), manifest.get("choices", {}).get("precision")
    evaluation = prepare_evaluation(config, place, hashes, tuned=names[0] == "tuned", say=console.say)
    console.say(align(evaluation.table(), width=8))
    sums, counts = {}, counts_of(evaluation.run)
    for name in names:
        sums[name] = evaluation.sums(tuned=name == "tuned", say=console.say)
        if len(names) > 1:  # the second one may take long
            console.say(f"{name:<8}loss {counts.metrics(sums[name].sum(axis=0))['eval_loss']:.4f}")
    if evaluation.runtime.rank == 0:
        comparison = ModelComparison.of(sums, evaluation.rows.split_hashes, counts)
        console.say(comparison.table())
        facts = {"answers": comparison.answers, **evaluation.facts(), "weights": config.weights, **_origin(config)}
        is_beside_own = folder.resolve() == config.folder.resolve()
        target = folder / (
            evaluation.file_name(config.weights, recorded, config.kept_checkpoint) if is_beside_own else "evaluate.json"
        )
        write_json(target, {**comparison.as_dict(), **facts})
        console.say(f"written {target}")
    evaluation.runtime.leave()


def run_harness(config: EvaluateConfig, names: Sequence[str], console: Console) -> None:
    """Run the tasks of lm-evaluation-harness and write harness.json."""
    require_harness(config.harness)
    target = _writable_folder(config.output_dir) / "harness.json"
    from app.base.tokenizer import load_tokenizer
    from app.evaluation.run import open_finished_run
    from app.training.final_model import at_checkpoint

    console.say(f"run     {config.folder}, {' and '.join(names)}\nharness {', '.join(config.harness)}")
    harness = prepare_harness(config.harness, config.harness_limit, chat=config.harness_chat)
    tokenizer = load_tokenizer(config.model, needs_template=config.harness_chat)
    hashes = read_manifest(config.folder / "manifest.json").get("hashes", {})
    with at_checkpoint(config.folder, config.kept_checkpoint, as_run(config)) as place:
        finished = open_finished_run(config, place, hashes, tuned=names[0] == "tuned")
        sides = {
            name: harness.evaluate(finished.model(tuned=name == "tuned"), tokenizer, config.eval.rows) for name in names
        }
    console.say(table(sides))
    facts = {**harness.facts(), **_origin(config), "precision": finished.choices.precision}
    write_json(target, {**with_earlier_tasks(sides, facts, target), **facts})
    console.say(f"written {target}")


def _origin(config: EvaluateConfig) -> dict[str, Any]:
    """Return the run and its checkpoint, for JSON."""
    checkpoint = {} if config.kept_checkpoint is None else {"checkpoint": config.kept_checkpoint}
    return {"run": str(config.folder), **checkpoint}


def _check_parts(config: EvaluateConfig) -> None:
    """Run the fast checks of all packages, and report all problems together."""
    from app.base import tokenizer
    from app.data import sources

    refuse([*sources.check(config.dataset, training=False), *tokenizer.check(config.model)])


def _writable_folder(output_dir: str) -> Path:
    """Create the output folder, and raise before scoring if it is not writable."""
    folder = Path(output_dir).expanduser()
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise EnvironmentProblem(f"output_dir={output_dir}: not writable. Set another folder for evaluate.json.")
    return folder


def _command(arguments: Sequence[str]) -> int:
    config = evaluate_config(arguments)
    count = processes_to_start(config.launch)
    if count:
        return launch(count, ["-m", "app.evaluate", *arguments])
    names = ("tuned", "base") if config.weights == "both" else (config.weights,)
    run = run_harness if config.harness else score
    run(config, names, open_console() if world().is_first else Console(enabled=False))
    return 0


def main() -> None:
    """Exit codes as of finetune train."""
    with reporting_crashes():
        run_command(_command, lambda _: command_help(__doc__, EVALUATE), fail_as_one_of_several)


if __name__ == "__main__":
    main()
