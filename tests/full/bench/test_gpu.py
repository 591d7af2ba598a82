"""scripts/bench/gpu.py: a session on a CPU with tiny shapes, so that a lent GPU needs no editing."""

import json
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from app.layers.comparison import Comparison
from scripts.bench import loops
from scripts.bench.gpu import INCOMPLETE
from tests.bench.test_bench import COMMON
from tests.conftest import REPO
from tests.full.bench.conftest import Bench, lines_of
from tests.model import small
from tests.model.test_compile import BLOCKS, blocks_of, packed

FILES = {"lines.jsonl", "phases.txt", "beside.log", "turns.log", "failures.txt"}
UNAVAILABLE = "the package unsloth"


def contest(framework: str, **values: Any) -> dict[str, Any]:
    return {"framework": framework, "seconds": 4, **values}


def command(name: str, *words: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "command": shlex.join(words), "seconds": 1, **values}


def session(
    bench: Bench, beside: list[Any], turns: list[Any], *, seconds: float = 200, code: int = 0, options: Any = ()
) -> list[dict[str, Any]]:
    """The lines of a session that must end with `code`."""
    sections = {name: {"limit": 90, "items": items} for name, items in (("beside", beside), ("turns", turns))}
    plan = "".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items())
    (bench.folder / "plan.yaml").write_text(f"contest: {COMMON}\n{plan}")
    options = ["--out", "out", "--seconds", str(seconds), "--device", "cpu", "--tiny", *options]
    ended = bench.run([sys.executable, "-m", "scripts.bench.gpu", "plan.yaml", *options], PYTHONPATH=str(REPO))
    assert ended.returncode == code, ended.stdout + ended.stderr
    out = bench.folder / "out"
    assert {file.name for file in out.iterdir()} <= FILES
    return lines_of(out / "lines.jsonl") if (out / "lines.jsonl").exists() else []


def phases(bench: Bench) -> str:
    return (bench.folder / "out" / "phases.txt").read_text()


def test_session_measures_contests_and_repeats_the_first(bench: Bench) -> None:
    rows = f'"{sys.executable}" -c \'open("{{lines}}", "w").write("{{{{\\"rung\\": 1}}}}\\n")\''
    beside = [{"name": "ladder", "command": rows, "seconds": 1}, contest("ours:compile=none", profile=False)]
    turns = [contest("ours:compile=blocks"), contest("unsloth"), contest("ours:compile=none", method="qlora")]
    lines = session(bench, beside, [{**each, "profile": True} for each in turns], code=INCOMPLETE)
    assert {"rung": 1} in lines
    by_phase = {phase: [line for line in lines if line.get("phase") == phase] for phase in ("beside", "turns")}
    assert [line.get("error") for line in by_phase["beside"]] == [None, None]
    compiled, unavailable, plain, again = by_phase["turns"]
    assert UNAVAILABLE in unavailable["error"]
    assert compiled["losses"] == again["losses"]
    assert (compiled["turn"], again["turn"]) == (0, 1)
    assert "the first contest and its repetition differ by" in phases(bench)
    assert compiled["verified"]["measured"] == "compiled layers"
    assert compiled["verified"]["graphs"] > 0
    assert plain["verified"] is None
    assert plain["method"] == "qlora"
    for line in (compiled, plain, again):
        assert {row["class"] for row in line["operations"]} >= {"base products", "thin products", "head products"}
        assert line["classes"]["base products"] > 0
        assert line["gpu"]["sm_mhz"] is None
        assert line["planned_memory_bytes"] > 0
        assert len(json.dumps(line)) < 60_000


def test_session_slow_item_is_killed_with_its_children(bench: Bench) -> None:
    child = f"{sys.executable} -c 'import time; time.sleep(60)' & echo $! >{bench.folder / 'pid'}; wait"
    slow = command("slow", "bash", "-c", f"echo started; {child}", limit=2)
    lines = session(bench, [slow], [command("wrong", "bash", "-c", "echo out of memory; exit 4")], code=INCOMPLETE)
    assert lines[0]["error"] == "stopped after 2 s"
    assert lines[1]["error"] == "exit code 4: out of memory"
    assert "started" in (bench.folder / "out" / "beside.log").read_text()
    pid = Path(f"/proc/{(bench.folder / 'pid').read_text().strip()}/cmdline")
    deadline = time.monotonic() + 5
    while pid.exists() and pid.read_bytes():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.02)


def test_session_items_without_time_are_skipped(bench: Bench) -> None:
    turns = [command("sleeping", "sleep", "60", limit=60), command("late", "true")]
    assert [line["name"] for line in session(bench, [], turns, seconds=14, code=INCOMPLETE)] == ["sleeping"]
    assert "skipped, no time left: late" in phases(bench)


def test_session_forecast_keeps_time_for_the_repetition(bench: Bench) -> None:
    turns = [command("long", "true", seconds=5), contest("ours"), contest("ours", recompute=True)]
    session(bench, [], turns, seconds=11, code=INCOMPLETE)
    expected = [line.partition("expected: ")[2] for line in phases(bench).splitlines() if "expected" in line]
    assert [("skipped" in line) for line in expected] == [False, False, True, True, False]


def test_report_failures_with_xdist_writes_failed_test_once(bench: Bench) -> None:
    (bench.folder / "test_it.py").write_text("def test_a():\n    assert 1 == 2\n\ndef test_b():\n    pass\n")
    words = ["-m", "pytest", "-q", "-n", "1", "-p", "scripts.bench.report_failures", str(bench.folder / "test_it.py")]
    (line,) = session(bench, [command("tests", sys.executable, *words)], [], code=INCOMPLETE)
    assert "1 failed, 1 passed" in line["error"]
    failures = (bench.folder / "out" / "failures.txt").read_text()
    assert failures.count("#####") == 1
    assert "test_it.py::test_a [call]" in failures
    assert "assert 1 == 2" in failures


def test_session_installs_wheels_for_its_children(bench: Bench) -> None:
    info = "lent-1.dist-info"
    files = {
        "lent.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: lent\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    (bench.folder / "wheels").mkdir()
    with zipfile.ZipFile(bench.folder / "wheels" / "lent-1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    turns = [command("import", "{python}", "-c", "import lent; print(lent.__file__)")]
    (line,) = session(bench, [], turns, options=["--wheels", "wheels"])
    assert "site/lent.py" in line["said"]
    assert not Path(line["said"]).exists(), "the folder is removed"


def test_session_process_does_not_import_torch() -> None:
    code = "import sys, scripts.bench.gpu; sys.exit(bool({'torch', 'numpy', 'hydra'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


@pytest.mark.parametrize("fault", ["fails", "raises"])
def test_verify_layers_after_failure_turns_compiled_layers_off(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.training_model_of("llama", compile=BLOCKS)

    def verify(*_: Any) -> Comparison:
        if fault == "raises":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Comparison("gradient", 0.5, 0.1)

    monkeypatch.setattr(loops, "verify_compiled", verify)
    verified = loops.verify_layers(model, blocks_of(model), packed(0))
    assert verified["measured"].startswith("compile=none")
    assert (
        verified["result"]
        == {
            "fails": "gradient differs by 5.0e-01 (allowed 1.0e-01)",
            "raises": "OutOfMemoryError: CUDA out of memory.",
        }[fault]
    )
    assert not blocks_of(model).is_on
