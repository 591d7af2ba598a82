"""app.check as a process: what is shown, written and returned is what a run would find."""

from pathlib import Path

from tests.command.test_check import look, memory_in
from tests.conftest import RunApp
from tests.harness.runs import Zygote


def test_check_memory_of_80_layers_traces_four(zygote: Zygote, tmp_path: Path) -> None:
    words = ("model=llama_70b", "recipe=qlora", "hardware=h100", "training.recompute=true")
    code, _, wrong = look(zygote, tmp_path, "memory", *words, "output_dir=look")
    assert code == 0, wrong
    assert memory_in(tmp_path / "look")["traced_layers"] == 4, "the first two, the last one, and one more"


def test_check_memory_that_does_not_fit_exits_with_2(zygote: Zygote, tmp_path: Path) -> None:
    words = ("model.weights=random", "recipe=full", "batching.tokens=512", "dataset.max_length=512", "exact=true")
    gpu = ("hardware=rtx4090", "hardware.context_gib=0", "hardware.memory_gib=0.04")
    code, _, wrong = look(zygote, tmp_path, "memory", *words, *gpu, "output_dir=look")
    assert code == 2
    facts = memory_in(tmp_path / "look")
    assert (facts["fits"], facts["exact"], facts["traced_layers"]) == (False, True, 4)
    assert facts["knobs"]
    assert wrong.startswith("error: it needs ")
    assert "optimizer states" in wrong
    best, enough = facts["together"]["override"], [each for each in facts["knobs"] if each["fits"]]
    assert wrong.endswith(f"Set {best}.\n")
    assert {each["costs"] for each in enough} <= {"training result"}, "or nothing would be tried together"

    named = {word.partition("=")[0] for word in best.split()}
    rest = [word for word in words if word.partition("=")[0] not in named]
    code, _, wrong = look(zygote, tmp_path, "memory", *rest, *best.split(), *gpu)
    assert (code, wrong) == (0, ""), "the way in leads in"


def test_check_cluster_launches_its_processes(run_app: RunApp, tmp_path: Path) -> None:
    ended = run_app("cluster", "launch.num_processes=2", module="app.check")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("all-reduce") == 1
    assert list(tmp_path.iterdir()) == []
