"""Repeat a run from its run.yaml and manifest.json, and compare the metrics line by line.

finetune reproduce run=runs/mine                 all its steps, bit for bit
finetune reproduce run=runs/mine steps=20 tolerance=1e-3
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.config.commands import run_command
from app.config.finished_run import REPRODUCE, ReproduceConfig, as_run, read_manifest, reproduce_config
from app.config.help import command_help
from app.config.schema import RunConfig
from app.errors import CheckpointError, ConfigError
from app.files import write_json
from app.tracking.compare_runs import Difference, LineComparison, compare_content, compare_lines, compare_programs
from app.tracking.console import Console, open_console
from app.tracking.formatting import align
from app.tracking.output_dir import RunFolder, read_lines
from app.tracking.recorder import program_here
from app.train import train

# torch is imported inside functions so that command-line errors are reported within a second

DIFFERENT = 3  # exit code


def reproduce(config: ReproduceConfig, console: Console) -> int:
    """Repeat the run, compare, write reproduce.json, and return the exit code."""
    before, after = RunFolder(config.folder), RunFolder(Path(config.output_dir).expanduser())
    if after.path.exists() and not (after.path.is_dir() and not any(after.path.iterdir())):
        raise ConfigError(f"output_dir={after.path} is not empty. Move it away, or set another folder.")
    lines = _logged_lines(before, config.steps)
    last = max(int(line["step"]) for line in lines)
    console.say(f"run     {before.path}, {last} steps, repeated in {after.path}")
    run = as_run(config)
    run = replace(run, training=replace(run.training, stop_after=last))
    programs, content = _differences(before, run)
    differences = "\n".join(map(str, [*programs, *content]))
    same = "same versions, commit, hardware, rows, tokenizer and base"
    console.say(align([("origin", differences or same)], width=8))
    if content and not config.anyway:
        raise CheckpointError(
            f"run={config.run}: {'; '.join(map(str, content))}. The result would differ. If files were moved, set "
            "dataset.path=, dataset.eval_path= or model.path=. To run anyway, set anyway=true."
        )
    code = train(run)
    comparison = compare_lines(lines, read_lines(after.metrics))
    if code and comparison.last_step != last:
        console.say(f"Stopped, not compared. To start again, remove {after.path} or set another output_dir")
        return code
    is_close = comparison.largest is None or comparison.largest.relative <= config.tolerance
    agrees = comparison.last_step == last and is_close
    console.say(align([("result", _verdict(comparison, agrees, last))], width=8))
    write_json(after.path / "reproduce.json", _result(config, comparison, agrees, [*programs, *content]))
    console.say(f"written {after.path / 'reproduce.json'}")
    return 0 if agrees else DIFFERENT


def _logged_lines(folder: RunFolder, steps: int | None) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, up to `steps` if given; raise an error if there are none."""
    lines = list(read_lines(folder.metrics)) if folder.metrics.is_file() and folder.manifest.is_file() else []
    selected = [line for line in lines if steps is None or line["step"] <= steps]
    if not any(line["step"] for line in selected):
        limit = "" if steps is None else f" up to step {steps}"
        raise CheckpointError(f"run={folder.path}: no steps were logged{limit}, so there is nothing to compare with.")
    return selected


def _differences(folder: RunFolder, run: RunConfig) -> tuple[list[Difference], list[Difference]]:
    """Return differences of programs, which may change results, and of content, which make it a different run."""
    from app.training.summary import provenance

    then, now = read_manifest(folder.manifest), {**program_here(), **provenance(run)}
    return compare_programs(then, now), compare_content(then, now)


def _verdict(comparison: LineComparison, agrees: bool, last: int) -> str:
    ended = "" if comparison.last_step == last else f"\nended there; the original run continued to step {last}"
    return f"{'agrees' if agrees else 'differs'}, {comparison.summary()}{ended}"


def _result(
    config: ReproduceConfig, comparison: LineComparison, agrees: bool, origin: Sequence[Difference]
) -> dict[str, Any]:
    return {
        "run": config.run,
        "agrees": agrees,
        "tolerance": config.tolerance,
        "same_bits": comparison.first is None,
        "lines": comparison.lines,
        "last_step": comparison.last_step,
        "first_difference": comparison.first and comparison.first.as_dict(),
        "largest_difference": comparison.largest and comparison.largest.as_dict(),
        "origin": [asdict(difference) for difference in origin],
    }


def _command(arguments: Sequence[str]) -> int:
    config = reproduce_config(arguments)
    return reproduce(config, open_console())


def main() -> None:
    """Exit codes of finetune train, and 3 if results differ."""
    run_command(_command, lambda _: command_help(__doc__, REPRODUCE))


if __name__ == "__main__":
    main()
