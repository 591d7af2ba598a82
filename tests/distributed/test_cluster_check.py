"""What finetune check cluster concludes from the facts of the processes."""

import socket
from datetime import timedelta
from typing import Any

import pytest

from app.distributed import cluster_check
from app.distributed.cluster_check import Unreachable, bus_factor, check_cluster, notes_of, stops_of
from app.distributed.launch import World


def member(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": f"gpu{rank // 2}",
        "device": {"name": "H100", "id": f"uuid-{rank}", "cores": 8},
        "versions": {"torch": "2.13.0", "peft": "0.21.2"},
        "matmul_flops": 100.0,
        "clock_offset_seconds": 0.0,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({}, []),
        (
            {"versions": {"torch": "2.12.1"}},
            [
                "peft=0.21.2: process 3 (gpu1) has none. Install",
                "torch=2.13.0: process 3 (gpu1) has 2.12.1. Install",
            ],
        ),
        ({"device": {"id": "uuid-2"}}, ["device=uuid-2: processes 2, 3 (gpu1) share this GPU. Start one process"]),
        ({"device": {"id": None}}, ["device=cpu: process 3 (gpu1) found no GPU, but others did."]),
    ],
)  # fmt: skip
def test_cluster_check_one_process_differs_run_is_stopped(changes: dict[str, Any], stops: list[str]) -> None:
    ranks = [*(member(rank) for rank in range(3)), member(3, **changes)]
    problems = stops_of(ranks)
    assert len(problems) == len(stops), problems
    for text, expected in zip(problems, stops, strict=True):
        assert text.startswith(expected)


def test_cluster_notes_name_slow_process_and_wrong_clock() -> None:
    ranks = [member(0), member(1, matmul_flops=40.0), member(2, clock_offset_seconds=-3.25)]
    notes = list(notes_of(ranks))
    assert notes[0].startswith("process 1 (gpu0) has 40% of the speed of the fastest H100")
    assert notes[1:] == ["the clock of process 2 (gpu1) differs from process 0 by -3.2 s"]
    assert list(notes_of([member(0), member(1, device={"name": "L4"}, matmul_flops=9.0)])) == []


def test_bus_factor_equals_that_of_nccl_tests() -> None:
    names = ("all-reduce", "broadcast", "reduce-scatter", "all-gather", "reduce")
    assert [bus_factor(name, 4) for name in names] == [1.5, 1.0, 0.75, 0.75, 1.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_cluster_check_unreachable_store_is_reported_with_remedy(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster_check, "CONNECT_TIMEOUT", timedelta(milliseconds=100))
    message = rf"rendezvous=127\.0\.0\.1:{port}: process {rank} of 2 on .* could not reach the others \(.*GLOO_SOCKET"
    with pytest.raises(Unreachable, match=message):
        check_cluster(World(rank, 2), {})
