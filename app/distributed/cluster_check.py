"""Check a cluster: versions, devices and clocks of all processes, and their compute and communication speed.

Facts go through the store of the rendezvous, so that they are available if no process group can be created.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from app.distributed.launch import World
from app.errors import EnvironmentProblem, first_line

Facts = Mapping[str, Any]

CONNECT_TIMEOUT = timedelta(seconds=60)
_SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 24, 1 << 28)}  # bytes
_MAX_SECONDS = 1.0  # of one call: slower sizes are skipped
_TIMED_SECONDS = 0.2  # for all calls of a mean
_MAX_CALLS = 20
_SLOW_RATIO = 0.5  # relative to the fastest device of the same name
_MAX_CLOCK_SECONDS = 1.0

# torch 2.13 has them under new names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# `whole` has the reported bytes of the call, `part` those of one process
_COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all-reduce": lambda whole, _part: dist.all_reduce(whole),
    "broadcast": lambda whole, _part: dist.broadcast(whole, 0),
    "reduce-scatter": lambda whole, part: _reduce_scatter(part, whole),
    "all-gather": _all_gather,
    "reduce": lambda whole, _part: dist.reduce(whole, 0),
}


class Unreachable(EnvironmentProblem):
    """A process cannot reach the others; each of them reports it."""


def check_cluster(here: World, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the section `cluster` of check.json, on every process. Nothing is timed if a run would stop."""
    started = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", here.local_rank % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    collectives: list[dict[str, Any]] = []
    with _reporting_unreachable(here):
        meeting, _, _ = next(rendezvous("env://", here.rank, here.size, timeout=CONNECT_TIMEOUT))
        meeting.set_timeout(CONNECT_TIMEOUT)
        store = dist.PrefixStore("cluster_check", meeting)  # type: ignore[attr-defined]
        ranks = _exchange(store, here, _facts_of(here, versions, device))
        stops = stops_of(ranks)
        if not stops:
            with _group(store, here, device):
                _by_rank(0.0)  # a barrier, so that clocks are read together
                clocks = _by_rank(time.time())
                for facts, clock, speed in zip(ranks, clocks, _by_rank(_matmul_flops(device)), strict=True):
                    facts |= {"clock_offset_seconds": clock - clocks[0], "matmul_flops": speed}
                collectives = [row for name in _COLLECTIVES for row in _timed_sizes(name, device)]
    return {
        "processes": here.size,
        "machines": len({facts["host"] for facts in ranks}),
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "ranks": ranks,
        "collectives": collectives,
        "notes": [] if stops else list(notes_of(ranks)),
        "seconds": round(time.perf_counter() - started, 2),
        "stops": stops,
    }


# ---- conclusions from the facts of all processes


def stops_of(ranks: Sequence[Facts]) -> list[str]:
    """Return the errors that would stop a run of processes with these facts."""
    return [*_version_stops(ranks), *_device_stops(ranks)]


def _version_stops(ranks: Sequence[Facts]) -> Iterator[str]:
    for name in sorted({name for facts in ranks for name in facts["versions"]}):
        values = [facts["versions"].get(name, "none") for facts in ranks]
        for other in dict.fromkeys(values):
            if other != values[0]:
                who = _processes([facts for facts, value in zip(ranks, values, strict=True) if value == other])
                yield f"{name}={values[0]}: {who} has {other}. Install the same versions on every machine."


def _device_stops(ranks: Sequence[Facts]) -> Iterator[str]:
    users: dict[str, list[Facts]] = {}
    for facts in ranks:
        if facts["device"]["id"] is not None:
            users.setdefault(facts["device"]["id"], []).append(facts)
    for device, members in users.items():
        if len(members) > 1:
            yield (
                f"device={device}: {_processes(members)} share this GPU. Start one process per GPU on each machine, "
                "and let each process see all GPUs or a different one."
            )
    without = [facts for facts in ranks if facts["device"]["id"] is None]
    if users and without:
        yield f"device=cpu: {_processes(without)} found no GPU, but others did. Fix the driver, or exclude it."


def notes_of(ranks: Sequence[Facts]) -> Iterator[str]:
    """Yield notes on processes less than half as fast as others with the same device, and on clocks that differ."""
    for facts in ranks:
        name, speed = facts["device"]["name"], facts["matmul_flops"]
        best = max(other["matmul_flops"] for other in ranks if other["device"]["name"] == name)
        if speed < _SLOW_RATIO * best:
            yield f"{_processes([facts])} has {speed / best:.0%} of the speed of the fastest {name} and slows all down"
        if abs(facts["clock_offset_seconds"]) > _MAX_CLOCK_SECONDS:
            yield f"the clock of {_processes([facts])} differs from process 0 by {facts['clock_offset_seconds']:+.1f} s"


def _processes(members: Sequence[Facts]) -> str:
    """Return e.g. `processes 1, 3 (gpu2)`."""
    hosts = ", ".join(sorted({facts["host"] for facts in members}))
    return f"{_numbered([facts['rank'] for facts in members])} ({hosts})"


def _numbered(ranks: Sequence[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ---- facts of one process, through the store


@contextmanager
def _reporting_unreachable(here: World) -> Iterator[None]:
    """Convert errors of the store, gloo and NCCL to the message that the processes cannot reach each other."""
    try:
        yield
    except RuntimeError as fault:
        raise Unreachable(
            f"rendezvous={_address()}: process {here.rank} of {here.size} on {socket.gethostname()} could not reach "
            f"the others ({first_line(fault)}). Open the ports between the machines, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to their common network."
        ) from fault


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _exchange(store: Any, here: World, facts: Facts) -> list[dict[str, Any]]:
    """Return the facts of all processes, by rank."""
    keys = [f"facts/{rank}" for rank in range(here.size)]
    store.set(keys[here.rank], json.dumps(facts))
    try:
        store.wait(keys, CONNECT_TIMEOUT)
    except RuntimeError as fault:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise Unreachable(
            f"rendezvous={_address()}: no answer from {_numbered(missing)} of {here.size} within "
            f"{CONNECT_TIMEOUT.seconds} s. Start all of them, and check their output."
        ) from fault
    return [json.loads(store.get(key)) for key in keys]


def _facts_of(here: World, versions: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    versions = dict(versions)
    facts = {"name": "cpu", "id": None, "cores": len(os.sched_getaffinity(0))}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "id": str(properties.uuid)}
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {"rank": here.rank, "host": socket.gethostname(), "device": facts, "versions": versions}


# ---- speeds, in a process group


@contextmanager
def _group(store: Any, here: World, device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=CONNECT_TIMEOUT)
    yield
    dist.destroy_process_group()  # not after an error: it would wait for the others


def _by_rank(value: float) -> list[float]:
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    by_rank: list[float] = values.tolist()
    return by_rank


def _seconds(device: torch.device, call: Callable[[], Any], times: int = 1) -> float:
    """Return the mean of `times` calls."""
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize(device)
    return (time.perf_counter() - started) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_flops(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / min(_seconds(device, lambda: matrix @ matrix) for _ in range(5))


def _timed_sizes(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    count = dist.get_world_size()
    seconds, before = 0.0, 1
    for aim in _SIZES[device.type]:
        if seconds * aim / before > _MAX_SECONDS:
            return
        part = torch.zeros(max(1, aim // 4 // count), device=device)
        whole = torch.zeros(len(part) * count, device=device)
        call = partial(_COLLECTIVES[name], whole, part)
        first = max(_by_rank(_seconds(device, call)))  # opens connections
        times = max(1, min(_MAX_CALLS, int(_TIMED_SECONDS / first)))
        seconds, before = max(_by_rank(_seconds(device, call, times))), aim
        rate = whole.nbytes / seconds
        yield {
            "name": name,
            "bytes": whole.nbytes,
            "seconds": seconds,
            "algorithm_bytes_per_second": rate,
            "bus_bytes_per_second": rate * bus_factor(name, count),
        }


def bus_factor(name: str, processes: int) -> float:
    """Return the bytes on the busiest link per byte of the tensor, as in nccl-tests."""
    parts = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
    return parts[name] * (processes - 1) / processes if name in parts else 1.0
