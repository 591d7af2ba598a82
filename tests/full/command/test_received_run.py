"""A run folder that somebody sends: none of its code runs, in any command that reads it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from app.files import CHECKSUMS, sha256
from tests.harness.runs import FINISHED, FinishedRuns, Zygote

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({made!r}).write_text("ran")
class Own(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = Own
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
READERS = {
    "app.generate": ("run=sent", "prompt=Hi", "max_new_tokens=2"),
    "app.evaluate": ("run=sent",),
    "app.export": ("run=sent", "kind=merged", "to=merged"),
    "app.reproduce": ("run=sent", "anyway=true"),
    "app.train": ("from=sent", "output_dir=varied"),
}


def edited(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def sent(finished: FinishedRuns, tmp_path: Path) -> Path:
    """A run whose base, tokenizer and run.yaml ask for code."""
    run = finished.copy(tmp_path / "sent")
    settings = yaml.safe_load((run / "run.yaml").read_text())
    settings["model"] |= {"trust_remote_code": True, "weights": "pretrained", "path": str(run / "base")}
    settings["model"] |= {"architecture": {}}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    for folder in (run / "base", run / "final"):
        (folder / "own.py").write_text(CODE.format(made=str(tmp_path / "ran")))
        edited(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
        edited(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    edited(run / "base" / "config.json", auto_map=CLASSES, model_type="own")
    for folder in (run / "base", run / "final"):  # whoever sends a run writes its checksums too
        files = [file for file in folder.iterdir() if file.name != CHECKSUMS]
        (folder / CHECKSUMS).write_text(json.dumps({file.name: sha256(file) for file in files}))
    return run


@pytest.mark.parametrize("module", READERS)
def test_received_run_runs_no_code(zygote: Zygote, sent: Path, tmp_path: Path, module: str) -> None:
    ended = zygote.run(tmp_path, *READERS[module], module=module)
    assert not (tmp_path / "ran").exists()
    assert ended.code == 2, ended.stderr
    assert "runs only with model.trust_remote_code=true" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_typed_trust_runs_code(zygote: Zygote, sent: Path, tmp_path: Path) -> None:
    zygote.finish(tmp_path, *READERS["app.generate"], "model.trust_remote_code=true", module="app.generate")
    assert (tmp_path / "ran").exists()


def test_checkpoint_without_checksums_is_damaged(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "sent")
    shutil.rmtree(run / "final")
    for save in (run / "checkpoints").iterdir():
        (save / "manifest.json").write_text("{}")
    ended = zygote.run(tmp_path, *FINISHED["lora"], "output_dir=sent", "resume=auto", code=2)
    assert "is not in manifest.json" in ended.stderr
