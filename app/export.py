"""Export a finished run for other programs, and verify the exported model.

finetune export run=runs/mine kind=adapter to=exports/mine      adapter, tokenizer and model card
finetune export run=runs/mine kind=merged to=exports/mine       adapter merged into the base, in bf16
finetune export run=runs/a kind=merged to=exports/ab adapters="[runs/a:0.7,runs/b:0.3]"      several adapters
finetune export run=runs/mine kind=quantized quant=nf4 to=exports/mine      merged, then 4-bit
finetune export run=runs/mine kind=quantized quant=fp8 to=exports/mine      for vLLM: fp8, w8a8 or w4a16
finetune export run=runs/mine kind=gguf quant=q8_0 to=exports/mine      for llama.cpp and Ollama
finetune export run=runs/mine kind=gguf quant=q4_k_m llama_cpp=DIR to=exports/mine      by llama.cpp's programs
finetune export run=runs/mine kind=adapter to=exports/mine push=me/mine      also upload it to the hub
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.commands import run_command
from app.config.finished_run import EXPORT, ExportConfig, as_run, export_config, read_manifest
from app.config.help import command_help
from app.errors import refuse
from app.exports.destination import REPORT, repository, require_target
from app.tracking.console import Console, open_console
from app.tracking.formatting import align, format_bytes
from app.tracking.recorder import program_here, read_result

if TYPE_CHECKING:
    from app.exports.kinds import Export

# torch is imported inside functions, so that an error in the command line is reported at once


def export(config: ExportConfig, console: Console) -> int:
    """Export by a checked config, verify and upload; return the exit code."""
    require_target(config.to, config.target)
    _check_parts(config)
    target = None if config.push is None else repository(config.push, private=config.private)
    code = _export(config, console)
    if target is not None and code == 0:
        message = f"Export of a run, kind={config.kind}, verified"
        console.say(f"pushed  {target.push(config.target, message)}{', private' if config.private else ''}")
    return code


def _export(config: ExportConfig, console: Console) -> int:
    """Export the run, one of its checkpoints, or a sum of adapters."""
    from app.adapters.merged_weights import Combination
    from app.training.final_model import at_checkpoint, combined

    run = as_run(config)
    if config.adapters:
        combination = Combination(config.combination, config.rank, config.density, run.seed)
        place = combined(config.folder, config.factors, combination, run)
    else:
        place = at_checkpoint(config.folder, config.kept_checkpoint, run)
    with place as folder:
        return _export_from(replace(config, run=str(folder)), config.folder, console)


def _export_from(config: ExportConfig, origin: Path, console: Console) -> int:
    """Export `config.run`, which comes from the run in `origin`."""
    from app.evaluation.run import prepare_evaluation
    from app.exports.export import make_export, prepare_export

    hashes = read_manifest(config.folder / "manifest.json").get("hashes", {})
    evaluation = prepare_evaluation(config, config.folder, hashes, tuned=True, say=console.say)
    planned = prepare_export(config, evaluation)
    console.say(
        align(
            [
                ("run", str(origin)),
                ("to", f"{config.to}, {format_bytes(planned.bytes)}"),
                ("kind", ", ".join(filter(None, (config.kind, config.written("quant"), config.written("dtype"))))),
            ],
            width=8,
        )
    )
    verification = make_export(planned, _facts(planned, origin), console.say)
    console.say(align([("proof", verification.lines())], width=8))
    if verification.passed:
        for program, text in planned.remarks():
            console.say(align([(program, text)], width=8))
        console.say(f"done    {config.to}")
        return 0
    console.say(f"failed  removed the weights; the differences are in {config.target / REPORT}")
    return 3


def _check_parts(config: ExportConfig) -> None:
    """Run the fast checks of all packages, and report all problems together."""
    from app.base import tokenizer
    from app.data import sources
    from app.exports.gguf import converter_problems

    problems = [*sources.check(config.dataset, training=False), *tokenizer.check(config.model)]
    if config.llama_cpp is not None:
        problems += converter_problems(config.llama_cpp, config.quant)
    if config.packages and find_spec(config.packages[0]) is None:
        packages = [name.replace("_", "-") for name in config.packages]
        problems.append(
            f"kind={config.kind} quant={config.quant} needs the package {packages[0]}, which is not installed: "
            f"pip install {' '.join(packages)}"
        )
    refuse(problems)


def _facts(planned: "Export", origin: Path) -> dict[str, Any]:
    """Return the facts of export.json, except the verification."""
    config = planned.config
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": str(origin.resolve()),
        **({} if config.kept_checkpoint is None else {"checkpoint": config.kept_checkpoint}),
        **({"combined": read_result(config.folder)["combined"]} if config.adapters else {}),
        "base": None if config.model.weights == "random" else config.model.path,
        "base_hash": planned.evaluation.hashes.get("base"),
        "versions": program_here(),
    }


def _command(arguments: Sequence[str]) -> int:
    config = export_config(arguments)
    return export(config, open_console())


def main() -> None:
    """Exit codes of finetune train, and 3 if the verification failed."""
    run_command(_command, lambda _: command_help(__doc__, EXPORT))


if __name__ == "__main__":
    main()
