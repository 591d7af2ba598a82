"""Of several failures the first one is told, once."""

import signal
from pathlib import Path

import pytest

from app.distributed.launch import FOLDER, Failure, failure_message, read_failure, report_failure, root_cause

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
    found = read_failure(tmp_path, 3)
    assert found is not None
    assert (found.rank, found.code, found.exit_code) == (3, 2, 2)
    assert failure_message(found, 4, printed="") == "error: no such file\n(process 3 of 4)"
    assert read_failure(tmp_path, 0) is None


def test_report_failure_without_launcher_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    report_failure(3, 2, "error: no such file")
    assert capsys.readouterr().err == "error: no such file\n(process 3)\n"


def test_failure_message_of_a_killed_process_has_its_last_lines() -> None:
    assert KILLED.exit_code == 137
    told = failure_message(Failure(1, -signal.SIGSEGV, at=1.0), 2, printed="one\ntwo\n")
    assert told == "process 1 of 2 was killed by SIGSEGV. Its last words:\none\ntwo"
    assert failure_message(Failure(1, 7, at=1.0), 2, printed="") == "process 1 of 2 ended with code 7."
