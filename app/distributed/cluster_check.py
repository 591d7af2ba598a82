"""What the processes of a run find of each other: versions, devices, clocks, files, and how fast they communicate.

What each one finds goes through the store of the rendezvous, so that it is known where no process group can be made.
"""

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from app.distributed.collective_speed import measure, numbered, processes
from app.errors import EnvironmentProblem

Facts = Mapping[str, Any]

_PATIENCE = timedelta(seconds=60)
_EDGE_BYTES = 1 << 20
_LATE_SECONDS = 5.0  # until a file is seen on a network disk


class Unreachable(EnvironmentProblem):
    """A process does not reach the others; each that finds it tells it."""


@dataclass(frozen=True, slots=True)
class Process:
    """This process, and what it finds on its machine."""

    rank: int
    size: int
    local_rank: int
    versions: Mapping[str, str]
    files: Mapping[str, Sequence[Path]]  # of the data, by `key=value`
    problems: Sequence[str]  # which the data has


def check_cluster(process: Process, folder: Path | None) -> dict[str, Any]:
    """The part `cluster` of check.json, on every process."""
    begun = time.perf_counter()
    device = _device(process.local_rank)
    with _told(process, "rendezvous"):
        store = _meet(process)
        found = _exchanged(store, process, "found", _found(process, device))
        outputs = _outputs(store, process, folder)
    for each, output in zip(found, outputs, strict=True):
        each["output"] = output
    unable = [*_version_stops(found, ("torch", "cuda", "nccl")), *_device_stops(found)]
    measured: dict[str, Any] = {"collectives": [], "links": [], "notes": []}
    if not unable:
        with _told(process, "collectives"), _group(store, process, device):
            measured = measure(device, found)
    return {
        "processes": process.size,
        "machines": len({each["host"] for each in found}),
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "output_dir": None if folder is None else str(folder),
        "ranks": found,
        **measured,
        "seconds": round(time.perf_counter() - begun, 2),
        "stops": stops_of(found, folder),
    }


def stops_of(found: Sequence[Facts], folder: Path | None) -> list[str]:
    """What would stop a run of processes that found this."""
    names = sorted({name for each in found for name in each["versions"]})
    return [
        *_version_stops(found, names),
        *_device_stops(found),
        *_data_stops(found),
        *_output_stops(found, folder),
    ]


# ---- how they meet


@contextmanager
def _told(process: Process, what: str) -> Iterator[None]:
    """Where the processes cannot reach each other, that is what the check has found."""
    try:
        yield
    except RuntimeError as fault:  # of the store, of gloo and of NCCL
        cause = str(fault).strip().splitlines()[0]
        raise Unreachable(
            f"{what}={_address()}: process {process.rank} of {process.size} on {socket.gethostname()} did not reach "
            f"the others ({cause}). Open the ports between the machines, or name the network that they share with "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        ) from fault


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _meet(process: Process) -> Any:
    store, _, _ = next(rendezvous("env://", process.rank, process.size, timeout=_PATIENCE))
    store.set_timeout(_PATIENCE)
    return dist.PrefixStore("cluster_check", store)  # type: ignore[attr-defined]


@contextmanager
def _group(store: Any, process: Process, device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=process.rank, world_size=process.size, timeout=_PATIENCE
    )
    yield
    dist.destroy_process_group()  # not after a fault: it would wait for the others


def _exchanged(store: Any, process: Process, name: str, value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    store.set(f"{name}/{process.rank}", json.dumps(value))
    if process.rank == 0:
        keys = [f"{name}/{rank}" for rank in range(process.size)]
        try:
            store.wait(keys, _PATIENCE)
        except RuntimeError as fault:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise Unreachable(
                f"rendezvous={_address()}: no answer from {numbered(missing)} of {process.size} within "
                f"{_PATIENCE.seconds} s. Start all of them, and look at what they print."
            ) from fault
        store.set(name, json.dumps([json.loads(store.get(key)) for key in keys]))
    store.wait([name], 2 * _PATIENCE)
    every: list[Any] = json.loads(store.get(name))
    return every


# ---- what a process finds by itself


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _found(process: Process, device: torch.device) -> dict[str, Any]:
    versions = dict(process.versions)
    facts = {"name": "cpu", "id": None, "cores": len(os.sched_getaffinity(0))}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "id": str(properties.uuid)}
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    hashes, problems = {}, list(process.problems)
    for key, files in process.files.items():
        try:
            hashes[key] = _hash(files)
        except OSError as fault:
            problems.append(f"{key}: cannot read {fault.filename} ({fault.strerror})")
    return {
        "rank": process.rank,
        "host": socket.gethostname(),
        "device": facts,
        "versions": versions,
        "files": hashes,
        "problems": problems,
    }


def _hash(files: Iterable[Path]) -> str:
    """Of the name, the size, the first and the last megabyte of each: copies on other machines have other times."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{path.name}\0{size}\n".encode())
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]


def _outputs(store: Any, process: Process, folder: Path | None) -> list[str | None]:
    """Of each process: `same` where it finds what the first one writes, and can write too; else what is wrong."""
    if folder is None:
        return [None] * process.size
    name = _exchanged(store, process, "name", uuid.uuid4().hex)[0]
    mine, wrong = folder / f".cluster-{name}-{process.rank}", ""
    try:
        try:
            mine.write_text(name)
        except OSError as fault:
            wrong = f"cannot write there ({fault.strerror})"
        _exchanged(store, process, "written", None)
        found = (wrong or "same") if _appears(folder / f".cluster-{name}-0", name) else "other"
        return _exchanged(store, process, "outputs", found)
    finally:
        with suppress(OSError):
            mine.unlink()


def _appears(file: Path, text: str) -> bool:
    end = time.monotonic() + _LATE_SECONDS
    while True:
        try:
            return file.read_text() == text
        except OSError:
            if time.monotonic() > end or not file.parent.is_dir():
                return False
        time.sleep(0.1)


# ---- what would stop a run


def _version_stops(found: Sequence[Facts], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        values = [each["versions"].get(name, "none") for each in found]
        for other, who in _unlike_first(found, values):
            yield f"{name}={values[0]}: {who} has {other}. Install the same versions on every machine."


def _device_stops(found: Sequence[Facts]) -> Iterator[str]:
    sharing: dict[str, list[Facts]] = {}
    for each in found:
        if each["device"]["id"] is not None:
            sharing.setdefault(each["device"]["id"], []).append(each)
    for device, members in sharing.items():
        if len(members) > 1:
            yield (
                f"device={device}: {processes(members)} share this GPU. Start as many processes on a machine as it has "
                "GPUs, and let each see all of them or one of its own."
            )
    without = [each for each in found if each["device"]["id"] is None]
    if sharing and without:
        yield f"device=cpu: no GPU is there for {processes(without)}, as for others. Mend the driver, or leave it out."


def _data_stops(found: Sequence[Facts]) -> Iterator[str]:
    for text in dict.fromkeys(problem for each in found for problem in each["problems"]):
        having = [each for each in found if text in each["problems"]]
        where = f". So it is for {processes(having)} only: put the data on a disk that all machines share"
        yield text if len(having) == len(found) else text + where
    for key in found[0]["files"]:
        same_key = [each for each in found if key in each["files"]]
        for _, who in _unlike_first(same_key, [each["files"][key] for each in same_key]):
            yield (
                f"{key}: {who} finds other files there than process 0. Put the data on a disk that all machines share, "
                "or copy it again."
            )


def _output_stops(found: Sequence[Facts], folder: Path | None) -> Iterator[str]:
    for text in dict.fromkeys(each["output"] for each in found if each["output"] not in (None, "same")):
        who = processes([each for each in found if each["output"] == text])
        cause = "does not find what process 0 writes there" if text == "other" else text
        yield f"output_dir={folder}: {who} {cause}. Put it on a disk that all machines share and may write to."


def _unlike_first(found: Sequence[Facts], values: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each value that is not that of the first process, and who has it."""
    for other in dict.fromkeys(values):
        if other != values[0]:
            having = [each for each, value in zip(found, values, strict=True) if value == other]
            yield other, processes(having)
