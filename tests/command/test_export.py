"""What is exported is the model of the run, or it is not exported."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.command.test_resume import SMALL
from tests.command.test_wrong_inputs import content_of, refused
from tests.conftest import RunApp
from tests.runs import Ended, Zygote

FEW = (*(text for text in SMALL if not text.startswith("eval.")), "eval.samples=0", "training.max_steps=4")
FEW += ("model.architecture.initializer_range=0.1",)  # logits that one wrong weight moves
RATE = "optimizer.lr=2e-2"
MADE = {
    "lora": ("recipe=lora", RATE),
    "qlora": ("recipe=qlora", RATE, "precision=bf16"),
    "full": ("recipe=full", "optimizer.lr=1e-2"),
}


@pytest.fixture(scope="module")
def made(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a recipe, trained once; exports leave it as it is."""
    folder = tmp_path_factory.mktemp("runs")

    def make(recipe: str) -> Path:
        run = folder / recipe
        if not run.exists():
            ended = zygote.run(folder, *FEW, *MADE[recipe], f"output_dir={run}")
            assert ended.code == 0, ended.stderr
        return run

    return make


def export(zygote: Zygote, folder: Path, run: Path, *given: str, **env: str) -> Ended:
    module = "tests.command.spoilt_export" if env else "app.export"
    return zygote.run(folder, f"run={run}", "to=out", *given, module=module, **env)


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "export.json").read_text())
    return found


def code_of_card(out: Path, app_env: dict[str, str], place: Path) -> None:
    """What the card says works, by itself, wherever the folder lies."""
    moved = shutil.copytree(out, place / "moved")
    shutil.rmtree(out)
    code = (moved / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    code += '\nprint(model(**tokenizer("a b", return_tensors="pt")).logits.shape[-1])'
    env = {name: value for name, value in app_env.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=moved, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1536"


def test_an_adapter_of_a_packed_base_goes_with_its_base(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path, app_env: dict[str, str]
) -> None:
    run = made("qlora")
    before = content_of(run)
    ended = export(zygote, tmp_path, run, "kind=adapter")
    assert (ended.code, ended.stderr) == (0, "")
    assert content_of(run) == before
    out = tmp_path / "out"
    assert not list(tmp_path.glob(".writing*"))

    found = report(out)
    assert (found["kind"], found["dtype"], found["passed"], found["tolerance"]) == (
        "adapter",
        None,
        True,
        1e-5,
    )
    assert found["difference"] <= 1e-6
    assert found["loss_after"] == pytest.approx(found["loss_before"], rel=1e-6)
    assert (found["rows"], found["rows_are"]) == (8, "held_out")
    assert found["versions"]["packages"]["peft"]
    files = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()} - {"export.json"}
    assert found["files"].keys() == files
    for name, described in found["files"].items():
        content = (out / name).read_bytes()
        assert described == {"sha256": sha256(content).hexdigest(), "bytes": len(content)}

    adapter = json.loads((out / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(out / "base")
    weights = "adapter_model.safetensors"
    assert (out / weights).read_bytes() == (run / "final" / weights).read_bytes()
    code_of_card(out, app_env, tmp_path)


def test_a_merged_model_is_proven(zygote: Zygote, made: Callable[[str], Path], tmp_path: Path) -> None:
    ended = export(zygote, tmp_path, made("qlora"), "kind=merged", "shard_gb=0.0002")
    assert (ended.code, ended.stderr) == (0, "")
    found = report(tmp_path / "out")
    assert (found["kind"], found["dtype"], found["passed"]) == ("merged", "bf16", True)
    assert 1e-4 < found["difference"] < found["tolerance"] / 3
    assert found["tolerance_is"] == "14 matrices rounded to bf16"
    assert abs(found["loss_after"] - found["loss_before"]) < 0.01
    names = found["files"].keys()
    assert "model.safetensors.index.json" in names
    assert {"README.md", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not [name for name in names if "adapter" in name or "base" in name]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| eval\\_loss |" in card
    assert "PeftModel" not in card


def test_an_export_that_is_not_the_model_leaves_only_its_report(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """All to one folder: where an export failed another may be made."""
    out = tmp_path / "out"
    for recipe, spoil in (("qlora", "careless"), ("lora", "tensor"), ("lora", "cut")):
        ended = export(zygote, tmp_path, made(recipe), "kind=merged", SPOIL=spoil)
        assert ended.code == 3, ended.stderr
        assert "FAILED" in ended.stdout
        assert [file.name for file in out.iterdir()] == ["export.json"]
        found = report(out)
        assert (found["passed"], found["files"]) == (False, {})
        if spoil == "cut":
            assert found["difference"] is None
            assert "SafetensorError" in found["failure"]
        else:
            assert found["difference"] > 2 * found["tolerance"]
        assert not list(tmp_path.glob(".writing*"))


WRONG = [
    ("lora", "kind=whole", "kind=whole is none of adapter, merged."),
    ("lora", "dtype=int8", "dtype=int8 is none of bf16, fp16, fp32."),
    ("lora", "optimizer.lr=1", "optimizer.lr=1: optimizer.lr does not apply, because an export writes down"),
    ("full", "kind=adapter", "kind=adapter: run={run} tuned a whole model"),
    ("lora", "dtype=fp16 kind=adapter", "dtype=fp16 would change nothing"),
    ("lora", "model.path=/models", "model.path=/models would not be read: this run keeps its base"),
    ("lora", "to=full", "to=full: the folder is not empty (it has mine.txt)"),
    ("lora", "to=file", "to=file: this is a file."),
]


@pytest.mark.parametrize(("recipe", "given", "message"), WRONG, ids=[given for _, given, _ in WRONG])
def test_what_cannot_be_exported_is_told(
    zygote: Zygote, made: Callable[[str], Path], tmp_path: Path, recipe: str, given: str, message: str
) -> None:
    run = made(recipe)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    words = {word.partition("=")[0]: word for word in ("kind=merged", "to=out", *given.split())}
    ended = zygote.run(tmp_path, f"run={run}", *words.values(), module="app.export")
    refused(ended.code, ended.stdout, ended.stderr, message.format(run=run))
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_told_before_anything_is_loaded(
    run_app: RunApp, made: Callable[[str], Path]
) -> None:
    ended = run_app(f"run={made('lora')}", module="app.export")
    refused(ended.returncode, ended.stdout, ended.stderr, "kind has no value. Give kind=...")
    assert "to has no value. Give to=..." in ended.stderr


def test_damage_and_a_full_disk(zygote: Zygote, made: Callable[[str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(made("lora"), tmp_path / "run")
    full = export(zygote, tmp_path, run, "kind=merged", "dtype=fp32", SPOIL="disk")
    refused(full.code, full.stdout, full.stderr, "the disk is full, nothing was exported")
    file = run / "final" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damaged = export(zygote, tmp_path, run, "kind=merged")
    refused(damaged.code, damaged.stdout, damaged.stderr, "adapter_model.safetensors is not what was written")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".writing*"))


def test_room_is_asked_for_before_anything_is_written(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.config.finished_run import export_config
    from app.engine.exporting import lay_export
    from app.engine.scoring import lay_scoring
    from app.errors import EnvironmentProblem

    config = export_config([f"run={made('lora')}", f"to={tmp_path}/a/b", "kind=merged"], lambda _: {})
    scoring = lay_scoring(config, config.folder, {}, tuned=True, say=lambda _: None)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=17_000_000))
    with pytest.raises(EnvironmentProblem, match=r"the export takes 17 MB, and .* has 17 MB free"):
        lay_export(config, scoring)
    assert not (tmp_path / "a").exists()
