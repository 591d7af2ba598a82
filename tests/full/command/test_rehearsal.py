"""training.rehearse in real runs: two processes, before the first step of every start, with memory and without."""

import json
from pathlib import Path

from tests.command.test_rehearsal import FEW, PADDED, told
from tests.harness.runs import Zygote, result, same_ending
from tests.training.test_rehearsal import files


def test_rehearsal_of_two_processes_changes_no_byte(zygote: Zygote, tmp_path: Path) -> None:
    """Mid-epoch, with dropout: each start rehearses, and both processes take part in its reduction."""
    command = (*FEW, "recipe=lora", "adapter.dropout=0.1", "batching.accumulation=1")
    plain, tried = tmp_path / "plain", tmp_path / "tried"
    for ended in zygote.run_together(tmp_path, 2, *command, f"output_dir={plain}"):
        assert (ended.code, ended.stderr) == (0, "")
    again = (*command, "training.rehearse=true", "resume=auto", f"output_dir={tried}")
    for code, more in ((75, ("training.stop_after=2",)), (0, ())):
        for ended in zygote.run_together(tmp_path, 2, *again, *more):
            assert (ended.code, ended.stderr) == (code, "")
    same_ending(plain, tried)
    names = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
    saves = [files(run / "checkpoints" / "step-000004") for run in (plain, tried)]
    assert all(saves[0][name] == saves[1][name] for name in names)
    assert [line.partition("): ")[2] for line in told(tried)] == ["it fits", "it fits"]
    assert told(plain) == []
    assert json.loads((tried / "manifest.json").read_text())["rehearsal"]["depth"] == 0


def test_rehearsal_out_of_memory_ends_the_run_early(zygote: Zygote, tmp_path: Path) -> None:
    given = {"WHERE": "backward", "RANKS": "0", "TOKENS": "3", "CALLS": "0"}
    words = (*FEW, *PADDED, "training.rehearse=true", "output_dir=run")
    ended = zygote.run(tmp_path, *words, module="tests.harness.scarcity", **given)
    assert ended.code == 2
    assert "error: out of memory: a document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "step 1/" not in ended.stdout
    assert result(tmp_path / "run")["status"] == "failed"
