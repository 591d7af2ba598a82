"""A finished run as files that other programs load, with the proof that they hold the same model.

python -m app.export run=runs/mine kind=adapter to=exports/mine      the adapter, its tokenizer and a card
python -m app.export run=runs/mine kind=merged to=exports/mine       base and adapter as one model, in bf16
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.commands import run_command
from app.config.finished_run import ExportConfig, export_config
from app.config.load import read_run
from app.errors import ConfigError
from app.exports.folder import REPORT, require_target
from app.tracking.console import Console, open_console
from app.tracking.formatting import align, format_bytes
from app.tracking.manifest import program_here, read_manifest
from app.tracking.recorder import read_result

if TYPE_CHECKING:
    from app.exports.export import Export

# torch, and what needs it, is imported inside functions: a mistake in the command line must not cost seconds


def export(config: ExportConfig, console: Console) -> int:
    """From a checked config to a folder with its certificate; returns the exit code."""
    require_target(config.to, config.target)
    _check_parts(config)
    from app.evaluation.run import lay_scoring
    from app.exports.export import lay_export, make_export

    manifest = _manifest(config.folder)
    scoring = lay_scoring(config, config.folder, manifest.get("hashes", {}), tuned=True, say=console.say)
    laid = lay_export(config, scoring)
    console.say(
        align(
            [
                ("run", str(config.folder)),
                ("to", f"{config.to}, {format_bytes(laid.bytes)}"),
                ("kind", f"{config.kind}, {config.dtype}" if laid.merge else config.kind),
            ],
            width=8,
        )
    )
    certificate = make_export(laid, _card(laid, manifest), _facts(laid), console.say)
    console.say(align([("proof", certificate.lines())], width=8))
    if certificate.passed:
        console.say(f"done    {config.to}")
        return 0
    console.say(f"failed  the weights were removed; {config.target / REPORT} has the numbers")
    return 3


def _check_parts(config: ExportConfig) -> None:
    """What each part can say in milliseconds, all problems together."""
    from app.data import sources
    from app.model import tokenizer

    problems = [*sources.check(config.dataset, training=False), *tokenizer.check(config.model)]
    if problems:
        raise ConfigError(problems)


def _card(laid: "Export", manifest: dict[str, Any]) -> str:
    from app.exports.export import loading_of
    from app.tracking.model_card import model_card

    folder = laid.config.folder
    return model_card(asdict(read_run(folder / "run.yaml")), manifest, read_result(folder), loading_of(laid))


def _facts(laid: "Export") -> dict[str, Any]:
    """What export.json says besides the certificate."""
    config = laid.config
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": str(config.folder.resolve()),
        "base": None if config.model.weights == "random" else config.model.path,
        "base_hash": laid.scoring.hashes.get("base"),
        "versions": program_here(),
    }


def _manifest(folder: Path) -> dict[str, Any]:
    return read_manifest(folder / "manifest.json")


def _command(arguments: Sequence[str]) -> int:
    config = export_config(arguments, lambda folder: _manifest(folder).get("choices", {}))
    return export(config, open_console())


def main() -> None:
    """Exit codes as of app.train; 3 if the certificate failed."""
    run_command(_command)


if __name__ == "__main__":
    main()
