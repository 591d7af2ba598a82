"""Time matrix products, collectives and links of a process group, and name slow processes and links."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Facts = Mapping[str, Any]

_SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 24, 1 << 28)}  # bytes
_MAX_SECONDS = 1.0  # of one call: a size that would take longer is left out
_TIMED_SECONDS = 0.2  # for all calls of a mean
_MAX_CALLS = 20
_MAX_ALL_PAIRS = 8  # processes; among more only neighbours are timed
_ROUND_TRIPS = 5
_SLOW_RATIO = 0.5  # to the fastest of its kind

# torch 2.13 has them under new names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# `whole` has the bytes that are reported of the call, `part` those of one process
_COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all-reduce": lambda whole, _part: dist.all_reduce(whole),
    "broadcast": lambda whole, _part: dist.broadcast(whole, 0),
    "reduce-scatter": lambda whole, part: _reduce_scatter(part, whole),
    "all-gather": _all_gather,
    "reduce": lambda whole, _part: dist.reduce(whole, 0),
}


def bus_factor(name: str, processes: int) -> float:
    """Bytes that the busiest link carries for each byte of the tensor, as nccl-tests counts them."""
    parts = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
    return parts[name] * (processes - 1) / processes if name in parts else 1.0


def measure(device: torch.device, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure on all processes of the default group; clock and speed are added to the facts of each process."""
    speeds = _by_rank(_matmul_flops(device))
    for each, offset, speed in zip(found, _clock_offsets(), speeds, strict=True):
        each |= {"clock_offset_seconds": offset, "matmul_flops": speed}
    rows = [row for name in _COLLECTIVES for row in _timed_sizes(name, device)]
    links = _links(device, found)
    return {"collectives": rows, "links": links, "notes": [*slow_processes(found), *slow_links(links, found)]}


def slow_processes(found: Sequence[Facts]) -> Iterator[str]:
    """Name processes less than half as fast as others with the same device, and clocks that differ."""
    for each in found:
        name, speed = each["device"]["name"], each["matmul_flops"]
        best = max(other["matmul_flops"] for other in found if other["device"]["name"] == name)
        if speed < _SLOW_RATIO * best:
            yield f"{processes([each])} computes at {speed / best:.0%} of the speed of the fastest {name}; all wait"
        if abs(each["clock_offset_seconds"]) > 1:
            yield f"the clock of {processes([each])} is {each['clock_offset_seconds']:+.1f} s off that of process 0"


def slow_links(links: Sequence[Facts], found: Sequence[Facts]) -> Iterator[str]:
    """Name links less than half as fast as the fastest of their kind, or a process all of whose links are slow."""
    best: dict[bool, float] = {}
    for each in links:
        kind = each["between_machines"]
        best[kind] = max(best.get(kind, 0.0), each["bytes_per_second"])
    slow = [each for each in links if each["bytes_per_second"] < _SLOW_RATIO * best[each["between_machines"]]]
    ranks = set()
    for member in found:
        own = [each for each in links if member["rank"] in each["ranks"]]
        if len(own) > 1 and all(each in slow for each in own):
            ranks.add(member["rank"])
            yield f"every link of {processes([member])} has less than half the speed of the fastest"
    for each in slow:
        if not ranks.intersection(each["ranks"]):
            share = each["bytes_per_second"] / best[each["between_machines"]]
            ends = processes([found[rank] for rank in each["ranks"]])
            yield f"the link between {ends} has {share:.0%} of the speed of the fastest"


def processes(members: Sequence[Facts]) -> str:
    """`processes 1, 3 (gpu2)`."""
    hosts = ", ".join(sorted({each["host"] for each in members}))
    return f"{numbered([each['rank'] for each in members])} ({hosts})"


def numbered(ranks: Sequence[int]) -> str:
    """`process 1`, or `processes 1, 3`."""
    return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _highest(value: float) -> float:
    """Return the maximum over all processes, when all have called it."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def _by_rank(value: float) -> list[float]:
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    every: list[float] = values.tolist()
    return every


def _seconds(device: torch.device, call: Callable[[], Any], times: int = 1) -> float:
    """Return the mean of `times` calls."""
    _synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize(device)
    return (time.perf_counter() - begun) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_flops(device: torch.device) -> float:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / min(_seconds(device, lambda: matrix @ matrix) for _ in range(_ROUND_TRIPS))


def _clock_offsets() -> list[float]:
    """Estimate how far each clock is ahead of process 0's, from the quickest of some round trips, as NTP does."""
    rank, mine = dist.get_rank(), 0.0
    cell = torch.zeros(1, dtype=torch.float64)
    for other in range(1, dist.get_world_size()):
        trips = []
        for _ in range(_ROUND_TRIPS):
            if rank == other:
                sent = time.time()
                dist.send(cell, 0)
                dist.recv(cell, 0)
                back = time.time()
                trips.append((back - sent, (sent + back) / 2 - cell.item()))
            elif rank == 0:
                dist.recv(cell, other)
                dist.send(cell.fill_(time.time()), other)
        mine = min(trips)[1] if trips else mine
    return _by_rank(mine)


def _timed_sizes(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    count = dist.get_world_size()
    seconds, before = 0.0, 1
    for aim in _SIZES[device.type]:
        if seconds * aim / before > _MAX_SECONDS:
            return
        part = torch.zeros(max(1, aim // 4 // count), device=device)
        whole = torch.zeros(len(part) * count, device=device)
        call = partial(_COLLECTIVES[name], whole, part)
        first = _highest(_seconds(device, call))  # opens connections
        times = max(1, min(_MAX_CALLS, int(_TIMED_SECONDS / first)))
        seconds, before = _highest(_seconds(device, call, times)), aim
        rate = whole.nbytes / seconds
        yield {
            "name": name,
            "bytes": whole.nbytes,
            "seconds": seconds,
            "algorithm_bytes_per_second": rate,
            "bus_bytes_per_second": rate * bus_factor(name, count),
        }


def _links(device: torch.device, found: Sequence[Facts]) -> list[dict[str, Any]]:
    """Time a message there and back between pairs of processes, one pair after the other."""
    count, rank = dist.get_world_size(), dist.get_rank()
    ring = [(one, (one + 1) % count) for one in range(count)]
    pairs = list(combinations(range(count), 2)) if count <= _MAX_ALL_PAIRS else ring
    message = torch.zeros(_SIZES[device.type][1] // 4, device=device)
    links = []
    for pair in pairs:
        mine = 0.0
        if rank in pair:
            call = partial(_there_and_back, message, rank, *pair)
            trips = [_seconds(device, call) for _ in range(_ROUND_TRIPS + 1)]
            mine = 2 * message.nbytes / min(trips[1:])  # the first one opens the connection
        between = found[pair[0]]["host"] != found[pair[1]]["host"]
        links.append({"ranks": list(pair), "between_machines": between, "bytes_per_second": _highest(mine)})
    return links


def _there_and_back(message: Tensor, rank: int, one: int, other: int) -> None:
    if rank == one:
        dist.send(message, other)
        dist.recv(message, other)
    else:
        dist.recv(message, one)
        dist.send(message, one)
