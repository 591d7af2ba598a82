"""What is exported is the model of the run, or it is not exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness.runs import Ended, FinishedRuns, Zygote


def export(zygote: Zygote, folder: Path, run: Path, *given: str, **env: Any) -> Ended:
    module = "tests.command.spoilt_export" if env else "app.export"
    return zygote.run(folder, f"run={run}", "to=out", *given, module=module, **env)


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "export.json").read_text())
    return found


def test_merged_export_is_verified(quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    """In tests/full/command/test_export.py the process that verifies is a new one, not a fork."""
    ended = export(quick_zygote, tmp_path, finished("qlora"), "kind=merged", "dtype=bf16", "shard_gb=0.0002")
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
    (line,) = (line for line in card.splitlines() if line.startswith("| eval_loss |"))
    assert "±" in line
    assert str(tmp_path) not in card
    assert "PeftModel" not in card


def test_quantized_export_is_reloaded_to_the_bit_and_keeps_what_was_trained(
    quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path
) -> None:
    check_quantized(quick_zygote, finished, tmp_path, "qlora", "nf4", 4.5)
    found = report(tmp_path / "out")
    assert found["loss_after"] == pytest.approx(
        found["loss_before"], abs=4e-3
    )  # 2e-3, by processor; 6e-3 to 8e-3 from the packed base


def check_quantized(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path, recipe: str, quant: str, bits: float
) -> None:
    """What is read is what was written, and further from the run's model than the merged one, by little."""
    ended = export(zygote, tmp_path, finished(recipe), "kind=quantized", f"quant={quant}", "shard_gb=0.0002")
    assert (ended.code, ended.stderr) == (0, "")
    found, out = report(tmp_path / "out"), tmp_path / "out"
    assert (found["kind"], found["quant"], found["dtype"], found["passed"]) == ("quantized", quant, "bf16", True)
    assert found["tolerance_of"] == "kl"
    assert 1e-5 < found["kl"] < found["tolerance"] / 2
    assert f"KL from the model of the run: {found['kl']:.2g} nats" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["llm_int8_skip_modules"] == ["lm_head"]
    packed: dict[str, Any] = {}
    for file in out.glob("*.safetensors"):
        packed |= load_file(file)
    own = {name: each for name, each in packed.items() if ".mlp.up_proj." in name and each.numel() > 20}
    scales = sum(each.nbytes for name, each in own.items() if "quant_" not in name)
    assert scales * 8 == pytest.approx(bits * 2 * 64 * 128, rel=0.1)


def test_failed_export_leaves_only_its_report(quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    check_spoilt(quick_zygote, finished, tmp_path, ("lora", "tensor"))


def check_spoilt(zygote: Zygote, finished: FinishedRuns, tmp_path: Path, *spoilt: tuple[str, str]) -> None:
    """All to one folder: where an export failed another may be made."""
    out = tmp_path / "out"
    for recipe, spoil in spoilt:
        ended = export(zygote, tmp_path, finished(recipe), "kind=merged", SPOIL=spoil)
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


@pytest.mark.parametrize(
    ("given", "message"),
    [("to=full", "to=full: the folder is not empty (found mine.txt)"), ("to=file", "to=file: this is a file.")],
)
def test_impossible_export_is_refused(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path, given: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    zygote.refused(tmp_path, f"run={finished('lora')}", "kind=merged", given, module="app.export", message=message)


def test_export_errors_come_before_loading(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    said = "kind= is required. Set kind=adapter or kind=merged"
    ended = zygote.refused(tmp_path, f"run={finished('lora')}", module="app.export", message=said)
    assert "to= is required. Set to=..." in ended.stderr


def test_export_checks_disk_space_first(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.config.finished_run import export_config
    from app.errors import EnvironmentProblem
    from app.evaluation.run import prepare_evaluation
    from app.exports.export import prepare_export

    config = export_config([f"run={finished('lora')}", f"to={tmp_path}/a/b", "kind=merged"])
    scoring = prepare_evaluation(config, config.folder, {}, tuned=True, say=lambda _: None)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=17_000_000))
    with pytest.raises(EnvironmentProblem, match=r"the export needs 17 MB, but .* has 17 MB free"):
        prepare_export(config, scoring)
    assert not (tmp_path / "a").exists()
