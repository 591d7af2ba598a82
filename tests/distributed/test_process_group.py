"""What a runtime remarks on the machine that it was started on."""

import os

import pytest
import torch

from app.distributed.process_group import crowded_cores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return len(os.sched_getaffinity(0))


def started(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    given = {"RANK": 0, "WORLD_SIZE": processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": processes}
    for name, value in {**given, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


def test_more_processes_than_cores_are_remarked_on(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, cores + 1)
    (remark,) = crowded_cores()
    assert f"{cores + 1} processes share {cores} core" in remark
    assert f"launch.num_processes={cores}" in remark
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert crowded_cores() == [], "those on GPUs mostly wait for them"


def test_as_many_as_cores_are_not(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, cores)
    assert crowded_cores() == []
