"""Run a run again, from its run.yaml and manifest.json, and compare the numbers line by line.

python -m app.reproduce run=runs/mine                 as far as it went; the same bits are asked for
python -m app.reproduce run=runs/mine steps=20 tolerance=1e-3
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.config.command_line import command_help
from app.config.commands import run_command
from app.config.finished_run import REPRODUCE, ReproduceConfig, as_run, read_manifest, reproduce_config
from app.config.schema import RunConfig
from app.errors import CheckpointError, ConfigError
from app.files import write_json
from app.tracking.compare_runs import Difference, LineComparison, compare_content, compare_lines, compare_programs
from app.tracking.console import Console, open_console
from app.tracking.formatting import align
from app.tracking.output_dir import RunFolder, read_lines
from app.tracking.recorder import program_here
from app.train import train

# torch, and what needs it, is imported inside functions: a mistake in the command line must not cost seconds

DIFFERENT = 3  # the exit code


def reproduce(config: ReproduceConfig, console: Console) -> int:
    """Run it again, compare and write reproduce.json; returns the exit code."""
    before, after = RunFolder(config.folder), RunFolder(Path(config.output_dir).expanduser())
    if after.path.exists() and not (after.path.is_dir() and not any(after.path.iterdir())):
        raise ConfigError(f"output_dir={after.path}: there is something already. Move it away, or give another folder.")
    lines = _logged_lines(before, config.steps)
    last = max(int(line["step"]) for line in lines)
    console.say(f"run     {before.path}, {last} steps, again in {after.path}")
    run = as_run(config)
    run = replace(run, training=replace(run.training, stop_after=last))
    programs, content = _differences(before, run)
    differences = "\n".join(map(str, [*programs, *content]))
    same = "versions, commit, hardware, rows, tokenizer and base are the same"
    console.say(align([("origin", differences or same)], width=8))
    if content and not config.anyway:
        raise CheckpointError(
            f"run={config.run}: {'; '.join(map(str, content))}. It would be another run. If files only lie elsewhere "
            "now, give dataset.path=, dataset.eval_path= or model.path=; anyway=true runs it all the same."
        )
    code = train(run)
    found = compare_lines(lines, read_lines(after.metrics))
    if code and found.last_step != last:
        console.say(f"stopped, not compared: give another output_dir, or remove {after.path}, to begin again")
        return code
    agrees = found.last_step == last and (found.largest is None or found.largest.relative <= config.tolerance)
    console.say(align([("result", _verdict(found, agrees, last))], width=8))
    write_json(after.path / "reproduce.json", _result(config, found, agrees, [*programs, *content]))
    console.say(f"written {after.path / 'reproduce.json'}")
    return 0 if agrees else DIFFERENT


def _logged_lines(folder: RunFolder, steps: int | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, up to `steps` if given; no lines are an error."""
    lines = list(read_lines(folder.metrics)) if folder.metrics.is_file() and folder.manifest.is_file() else []
    wanted = [line for line in lines if steps is None or line["step"] <= steps]
    if not any(line["step"] for line in wanted):
        limit = "" if steps is None else f" up to step {steps}"
        raise CheckpointError(
            f"run={folder.path}: no step of it was logged{limit}, so there is nothing to compare with."
        )
    return wanted


def _differences(folder: RunFolder, run: RunConfig) -> tuple[list[Difference], list[Difference]]:
    """Differences of programs, which may change the numbers, and of content, which make it another run."""
    from app.training.summary import provenance

    then, now = read_manifest(folder.manifest), {**program_here(), **provenance(run)}
    return compare_programs(then, now), compare_content(then, now)


def _verdict(found: LineComparison, agrees: bool, last: int) -> str:
    ended = "" if found.last_step == last else f"\nit ended there; the first run went on to step {last}"
    return f"{'agrees' if agrees else 'differs'}, {found.summary()}{ended}"


def _result(
    config: ReproduceConfig, found: LineComparison, agrees: bool, origin: Sequence[Difference]
) -> dict[str, Any]:
    return {
        "run": config.run,
        "agrees": agrees,
        "tolerance": config.tolerance,
        "same_bits": found.first is None,
        "lines": found.lines,
        "last_step": found.last_step,
        "first_difference": found.first and found.first.as_dict(),
        "largest_difference": found.largest and found.largest.as_dict(),
        "origin": [asdict(each) for each in origin],
    }


def _command(arguments: Sequence[str]) -> int:
    config = reproduce_config(arguments)
    return reproduce(config, open_console())


def main() -> None:
    """Exit codes as of app.train, and 3 where the numbers differ."""
    run_command(_command, lambda: command_help(__doc__, REPRODUCE))


if __name__ == "__main__":
    main()
