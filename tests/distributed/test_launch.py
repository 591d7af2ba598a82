"""Launching: environment of a process, the first failure reported once, signals passed on."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from app import train
from app.config.load import compose_run
from app.distributed import launch
from app.distributed.launch import FOLDER, Failure, failure_message, read_failure, report_failure, root_cause
from app.signals import CODES
from tests.harness.composed import composed

KILLED = Failure(1, -signal.SIGKILL, at=100.0)  # noticed in whole seconds, after the others had spoken
PEER = Failure(0, 1, at=100.4, text="Connection closed by peer")
ENDED_BY_THE_AGENT = Failure(2, -signal.SIGTERM, at=99.0)
OWN_FAULT = Failure(3, 1, at=99.5, text="KeyError")
LATER_KILLED_BY_THE_AGENT = Failure(1, -signal.SIGKILL, at=130.0)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([PEER, KILLED], KILLED),
        ([PEER, ENDED_BY_THE_AGENT], PEER),
        ([PEER, OWN_FAULT, ENDED_BY_THE_AGENT], OWN_FAULT),
        ([OWN_FAULT, LATER_KILLED_BY_THE_AGENT], OWN_FAULT),
        ([ENDED_BY_THE_AGENT], ENDED_BY_THE_AGENT),
    ],
)
def test_root_cause_is_not_what_followed(failures: list[Failure], cause: Failure) -> None:
    assert root_cause(failures) == root_cause(failures[::-1]) == cause


def test_report_failure_is_read_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    report_failure(3, 2, "error: no such file")
    failure = read_failure(tmp_path, 3)
    assert failure is not None
    assert (failure.rank, failure.code, failure.exit_code) == (3, 2, 2)
    assert failure_message(failure, 4, printed="") == "error: no such file\n(process 3 of 4)"
    assert read_failure(tmp_path, 0) is None


def test_report_failure_without_launcher_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    report_failure(3, 2, "error: no such file")
    assert capsys.readouterr().err == "error: no such file\n(process 3)\n"


def test_failure_message_of_a_killed_process_has_its_last_lines() -> None:
    assert KILLED.exit_code == 137
    message = failure_message(Failure(1, -signal.SIGSEGV, at=1.0), 2, printed="one\ntwo\n")
    assert message == "process 1 of 2 was killed by SIGSEGV. Last output:\none\ntwo"
    assert failure_message(Failure(1, 7, at=1.0), 2, printed="") == "process 1 of 2 exited with code 7."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_launcher_signal_forwarded_to_processes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(launch, "child_pids", lambda: [child.pid])
        with launch.forwarding_signals() as received:
            os.kill(os.getpid(), number)
        assert (child.wait(10), received) == (-number, [number])


def test_launcher_agent_leaves_stop_signals_alone(tmp_path: Path) -> None:
    handled = launch.elastic_config(2, str(tmp_path)).signals_to_handle.split(",")
    assert not {number.name for number in CODES} & set(handled)


def test_launcher_finds_the_noted_depth_of_a_folder_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(train, "train_in_processes", lambda _count, _run, _command, file: launch.read_depth(file))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "depth.json").write_text("3")
    assert train.train(compose_run(["output_dir=~/run", "launch.num_processes=2"])) == 3


@pytest.mark.parametrize(("offload", "processes", "joined", "refused"), [
    (True, 1, False, True), (True, 2, False, False), (True, "auto", False, False), (True, 1, True, False),
    (False, 1, False, False),
])  # fmt: skip
def test_offload_without_other_processes_refused(
    offload: bool, processes: int | str, joined: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = composed(f"parallel.offload={offload}", f"launch.num_processes={processes}")
    if joined:
        for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": 0, "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
    assert [problem.partition(" ")[0] for problem in launch.check(run)] == ["parallel.offload=true"] * refused


@pytest.mark.parametrize(("variable", "value", "settings", "words"), [
    ("ACCELERATE_MIXED_PRECISION", "fp16", (), "--mixed_precision=fp16 has no effect"),
    ("ACCELERATE_MIXED_PRECISION", "fp8", (), "set quantization=fp8"),
    ("ACCELERATE_USE_FSDP", "true", (), "--use_fsdp has no effect"),
    ("ACCELERATE_USE_DEEPSPEED", "true", (), "parallel=zero2 or parallel=zero3"),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", (), "--dynamo_backend=inductor has no effect"),
    ("ACCELERATE_MIXED_PRECISION", "no", (), None),
    ("ACCELERATE_MIXED_PRECISION", "bf16", ("precision=bf16",), None),
    ("ACCELERATE_DYNAMO_BACKEND", "NO", (), None),
])  # fmt: skip
def test_option_of_accelerate_launch_refused_if_it_differs_from_the_run(
    variable: str, value: str, settings: tuple[str, ...], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    problems = list(launch.check(composed(*settings)))
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]
