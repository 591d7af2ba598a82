"""Where a run comes from: proofs, versions, machine, hashes, and the commands that make it again."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from app.page.document import badge, command, facts_table, folded, table
from app.page.figures import figure, number
from app.page.html import Child, Html, element, joined
from app.page.kept import KeptRun, section_of

_MODULE = "app.train"


def proofs(run: KeptRun) -> Child:
    """What was proven before the first step; None where nothing was kept."""
    kept = run.manifest.get("proofs")
    rows = [_proof(each) for each in kept if isinstance(each, Mapping)] if isinstance(kept, list) else []
    return (
        table(("", "before the first step", "difference", "allowed"), rows, numbers=(2, 3)) if rows else None
    )


def _proof(proof: Mapping[str, Any]) -> tuple[Child, ...]:
    found, allowed = number(proof.get("difference")), number(proof.get("allowed"))
    if found is None or allowed is None:
        return None, str(proof.get("what", "")), None, None
    holds = found <= allowed
    verdict = badge("holds" if holds else "broken", "good" if holds else "bad")
    return verdict, str(proof.get("what", "")), figure(found), figure(allowed)


def again(run: KeptRun) -> Child:
    """The same numbers once more, and the command that was typed."""
    return joined(
        element("p", "The same run from its own files, compared line by line:"),
        command(shlex.join(["python", "-m", "app.reproduce", f"run={run.folder}"])),
        _typed(run),
    )


def _typed(run: KeptRun) -> Html | None:
    words = _command_line(run)
    if not words:
        return None
    place = run.starts[0].get("folder")
    where = f" in {place}" if place else ""
    return joined(element("p", f"As it was typed{where}:"), command(shlex.join(words)))


def _command_line(run: KeptRun) -> list[str]:
    """Without the path of the interpreter; nothing where a launcher handed the settings over in a file."""
    line = run.starts[0].get("command_line") if run.starts else None
    words = [str(word) for word in line] if isinstance(line, list) else []
    if _MODULE not in words:
        return []
    typed = ["python", "-m", *words[words.index(_MODULE) :]]
    several = (number(section_of(run.manifest, "choices").get("processes")) or 1) > 1
    return [] if several and len(typed) == 3 else typed


def environment(run: KeptRun) -> Child:
    """Program, machine, packages, content."""
    starts = [_start(each) for each in run.starts]
    return joined(
        facts_table(_machine(run.manifest)),
        facts_table((name, element("code", text)) for name, text in _hashes(run.manifest)),
        folded("Packages", facts_table(_packages(run.manifest))) if run.manifest.get("packages") else None,
        folded("Starts", table(("time", "host", "commit"), starts)) if len(starts) > 1 else None,
    )


def _machine(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    hardware, choices = section_of(manifest, "hardware"), section_of(manifest, "choices")
    yield "program", f"app {section_of(manifest, 'program').get('version', '')}{_commit(manifest)}"
    yield "device", " ".join(str(each) for each in (hardware.get("gpu") or hardware.get("device"),) if each)
    cores = f"{hardware.get('cpu') or ''}, {manifest.get('cpus')} cores".strip(", ")
    yield "CPU", cores if manifest.get("cpus") else None
    chosen = [f"{key} {value}" for key, value in choices.items()]
    yield "chosen for it", ", ".join(chosen)
    yield "python", _text(manifest.get("python"))
    yield "platform", _text(manifest.get("platform"))
    yield "seed", _text(manifest.get("seed"))


def _commit(manifest: Mapping[str, Any]) -> str:
    git = section_of(manifest, "program", "git")
    if not git.get("commit"):
        return ", installed"
    return f", commit {git['commit']}{' with changes that are in no commit' if git.get('dirty') else ''}"


def _hashes(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = {"train": "rows to train on", "eval": "rows held out", "tokenizer": "tokenizer", "base": "base"}
    for key, value in section_of(manifest, "hashes").items():
        if value:
            yield f"hash of {names.get(key, key)}", str(value)


def _packages(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Child]]:
    for name, version in section_of(manifest, "packages").items():
        yield name, str(version)


def _start(start: Mapping[str, Any]) -> tuple[str, str, Html]:
    commit = str(section_of(start, "git").get("commit") or "")[:12]
    return str(start.get("time", "")), str(start.get("host", "")), element("code", commit)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
