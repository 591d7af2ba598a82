"""Randomly edited run folders, as received from others, for scripts/fuzz.py."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from app.config.commands import REPORT
from app.config.conf_files import to_yaml
from app.config.finished_run import evaluate_config, export_config, reproduce_config
from app.config.load import compose_run, read_run
from app.files import checksummed_folder, sha256
from app.tracking.console import Console

_SECRET = "the-value-of-a-variable"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 10**30, 1e308, 0.5, "", "x", "auto", "none", "${oc.env:RECEIVED}", "${seed}", "${"),
    *("../../../../etc/passwd", "/dev/zero", "\x1b[2J\u202e", "(a+)+$", "9" * 5000, "???", "\\${a}", "a b"),
    *([], {}, [[]], [None], ["x", 1], {"a": {}}, {"": 0}, {"kind": "none"}),
)
_SNIPPETS = (
    *("&a ", "*a", "[", "]", "{", "}", "\n", ": ", "- ", "#", '"', "'", "\0", "\t", "%", "|", "!!binary ", "<<: "),
    *(
        "[" * 3000,
        "{a: " * 3000,
        "- " * 3000,
        "!!python/object/apply:os.system [touch ran]",
        "&a [*a]",
        "1e999",
        "\ud800",
    ),
)


def fuzz_received(random: Random, folder: Path) -> None:
    """Edit one file of a run folder, and read the folder with a random command."""
    from app.adapters.adapters import read_adapter_config

    os.environ["RECEIVED"] = _SECRET
    _write_run(folder)
    name, readers = random.choice(_FILES)
    file = folder / name
    _edit(random, file)
    if name.startswith("checkpoints") and file.name != "manifest.json" and random.random() < 0.8:
        _seal(file.parent)
    readers = (lambda path: read_adapter_config(path / "final"),) if name.startswith("final") else readers
    content = random.choice(readers)(folder)
    assert _SECRET not in repr(content)
    assert not Path("ran").exists()


def _write_run(folder: Path) -> None:
    """Write the files of a run that the commands read."""
    from safetensors.torch import save_file

    (folder / "final").mkdir()
    for name, text in _texts().items():
        (folder / name).write_text(text)
    with checksummed_folder(folder / "checkpoints" / "step-000002") as save:
        for name in ("weights", "optimizer", "random"):
            save_file({}, save / f"{name}.safetensors")
        (save / "state.json").write_text(_state())
    save_file({}, folder / "final" / "adapter_model.safetensors")


@cache
def _texts() -> dict[str, str]:
    start = {"time": "2026-01-01T00:00:00+00:00", "host": "a", "folder": "/", "command_line": ["python"], "git": None}
    manifest: dict[str, Any] = {
        "created": "now",
        "starts": [start],
        "choices": {"precision": "bf16", "device": "cpu", "threads": 1},
    }
    manifest |= {"counts": {"data": {"train": {"source": "a", "samples": 3}}}, "hashes": {"base": "0"}, "cpus": 2}
    sample = {"step": 2, "prompt": "a", "expected": "b", "answer": "c"}
    preview = {
        "rows": [{"place": "a:1", "tokens": 2, "trained_tokens": 1, "pieces": []}],
        "lengths": {"edges": [0, 1, 2], "samples": [3, 4]},
    }
    adapter: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj"],
    }
    adapter |= {
        "fan_in_fan_out": False,
        "bias": "none",
        "rank_pattern": {},
        "init_lora_weights": True,
        "revision": None,
    }
    return {
        "run.yaml": to_yaml(asdict(compose_run([])) | {"output_dir": "x"}),
        "manifest.json": json.dumps(manifest),
        "result.json": json.dumps({"status": "finished", "objective": 1.0, "steps": 2, "final_metrics": {}}),
        "metrics.jsonl": json.dumps({"step": 1, "loss": 2.0}) + "\n",
        "samples.jsonl": json.dumps(sample) + "\n",
        "preview.json": json.dumps(preview),
        "final/adapter_config.json": json.dumps(adapter),
    }


@cache
def _state() -> str:
    from app.optim.optimizer_state import flatten
    from app.training.checkpoint import Progress

    state: dict[str, Any] = {
        "identity": {"steps": 9},
        "choices": {"precision": "bf16", "attention": "sdpa"},
        "scaler": None,
    }
    state |= {"optimizer": flatten({"state": {}, "param_groups": [{"lr": 0.1, "weight_decay": 0.0, "params": [0]}]})[1]}
    return json.dumps({**state, "progress": asdict(Progress(step=2))})


def _seal(save: Path) -> None:
    names = [file.name for file in save.iterdir() if file.name != "manifest.json"]
    (save / "manifest.json").write_text(json.dumps({name: sha256(save / name) for name in names}))


def _edit(random: Random, file: Path) -> None:
    """Change values or insert text in a file."""
    import yaml

    text = file.read_text()
    if random.random() < 0.7:
        is_yaml = file.suffix == ".yaml"
        data: Any = yaml.safe_load(text) if is_yaml else json.loads(text)
        for _ in range(random.choice((1, 1, 3))):
            data = _edited(random, data)
        text = yaml.safe_dump(data) if is_yaml else json.dumps(data) + "\n"
    else:
        for _ in range(random.choice((1, 1, 4))):
            at = random.randrange(len(text) + 1)
            text = text[:at] + random.choice(_SNIPPETS) + text[at + random.choice((0, 1, 40)) :]
    file.write_text(text, errors="surrogatepass")


def _edited(random: Random, data: Any) -> Any:
    """Return a copy with one value replaced, added or removed."""
    if not isinstance(data, dict | list) or not data or random.random() < 0.1:
        return random.choice(_VALUES)
    if isinstance(data, list):
        at = random.randrange(len(data))
        return [*data[:at], _edited(random, data[at]), *data[at + 1 :]]
    key = random.choice(list(data))
    if random.random() < 0.1:
        return {name: value for name, value in data.items() if name != key}
    if random.random() < 0.1:
        return {**data, str(random.choice(_VALUES))[:20]: random.choice(_VALUES)}
    return {**data, key: _edited(random, data[key])}


def _page(folder: Path) -> None:
    from app.report import report

    report(REPORT.parse([f"run={folder}", f"to={folder / 'page.html'}"]), Console(enabled=False))


def _checkpoint(folder: Path) -> Any:
    from app.training.checkpoint import choices_of, find_checkpoint

    return choices_of(find_checkpoint(folder / "checkpoints", "auto")[0])


def _start(folder: Path) -> None:
    """Read the manifest of the last start, as a new start does."""
    from app.tracking.recorder import Manifest

    Manifest(folder / "manifest.json").add({"seed": 1})


_CONFIGS: tuple[Callable[[Path], Any], ...] = (
    lambda folder: read_run(folder / "run.yaml"),
    lambda folder: compose_run([f"varied_from={folder}"]),
    lambda folder: evaluate_config([f"run={folder}"]),
    lambda folder: export_config([f"run={folder}", "to=x", "kind=adapter"]),
    lambda folder: reproduce_config([f"run={folder}"]),
    _page,
)
_FILES: Sequence[tuple[str, Sequence[Callable[[Path], Any]]]] = (
    *([("run.yaml", _CONFIGS)] * 3),
    ("manifest.json", (*_CONFIGS[2:], _start)),
    *((name, (_page,)) for name in ("result.json", "metrics.jsonl", "samples.jsonl", "preview.json")),
    ("final/adapter_config.json", ()),
    *((f"checkpoints/step-000002/{name}", (_checkpoint,)) for name in ("state.json", "manifest.json")),
)
