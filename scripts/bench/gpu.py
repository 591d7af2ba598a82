"""A measurement session on a GPU host within a time limit, from a plan.

python -m scripts.bench.gpu PLAN.yaml --out OUT --seconds N [--device cpu --tiny]

The items of `beside` run at the same time: tests, and small contests that fill compiler caches. Then those of `turns`
run one by one, alone on the device, while up to three contenders wait with their packages imported. An item
that fails or reaches its limit is killed, and the next one starts at once. This process does not import torch.

OUT/lines.jsonl has a line of JSON for each result, OUT/phases.txt a log of the session and of skipped items,
OUT/failures.txt the failed tests, OUT/beside.log and OUT/turns.log the end of the output of each item.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.contest import ROOT, environment
from scripts.bench.plan import Item, Plan, read_plan

INCOMPLETE = 3
_LAST_START = 12.0  # seconds before the deadline; no item starts later
_LAST_STOP = 2.0  # seconds before the deadline; all processes are killed
_WAITING = 3
_LOG_BYTES = 200_000  # of one item
_PIP = ("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target")
Line = dict[str, Any]


def main() -> None:
    """Run the plan; the exit code is 3 if an item failed or was skipped."""
    options = _options()
    plan = read_plan(options.plan, options.device, tiny=options.tiny)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as work:
        session = Session(options, Path(work))
        try:
            session.install()
            session.forecast(plan)
            session.run(plan)
        finally:
            session.stop_all()
    sys.exit(0 if session.complete else INCOMPLETE)


def _options() -> argparse.Namespace:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the session")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument(
        "--wheels", type=_wheels, default=[], help="folder of wheels to install for all items but Unsloth"
    )
    parser.add_argument("--wheels-unsloth", type=_wheels, default=[], help="folder of wheels to install for Unsloth")
    options = parser.parse_args()
    options.start, options.out = start, options.out.resolve()
    return options


def _wheels(folder: str) -> list[Path]:
    wheels = sorted(Path(folder).glob("*.whl"))
    if not wheels:
        raise argparse.ArgumentTypeError(f"{folder} has no wheels")
    return wheels


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """A process and its files; creating the file `turn` starts a waiting contest."""

    item: Item
    process: subprocess.Popen[bytes]
    start: float
    result: Path  # of a contest
    lines: Path  # of a command
    log: Path
    turn: Path


class Session:
    """Processes, deadline and output files of one call."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.complete = True
        self._options = options
        self._out: Path = options.out
        self._work = work
        self._start_time: float = options.start
        self._limit: float = options.seconds
        self._started: list[Started] = []  # processes that are not finished
        self._waiting: dict[int, Started] = {}  # by position in the queue
        self._number = 0

    def install(self) -> None:
        """Install both sets of wheels at the same time, each into its own temporary folder."""
        folders = {"site": self._options.wheels, "site-unsloth": self._options.wheels_unsloth}
        installing = {
            name: subprocess.Popen([sys.executable, "-m", "pip", "install", *_PIP, self._work / name, *wheels])
            for name, wheels in folders.items()
            if wheels
        }
        for name, process in installing.items():
            self._say(f"{len(folders[name])} wheels: exit code {process.wait()} of pip")
            self.complete &= process.returncode == 0

    def forecast(self, plan: Plan) -> None:
        """Log the expected end of each item, and which items will probably be skipped."""
        ends = self._seconds() + max((item.seconds for item in plan.beside), default=0.0)
        self._say(f"expected: {len(plan.beside)} items at the same time, until {ends:.0f} s")
        last = plan.repeated
        spare = last.seconds if last else 0.0
        for item in plan.turns:
            fits = ends + item.seconds + spare <= self._limit
            ends += item.seconds if fits else 0.0
            self._say(f"expected: {item.name}, " + (f"until {ends:.0f} s" if fits else "skipped, no time left"))
        if last:
            self._say(f"expected: {last.name}, until {ends + spare:.0f} s")

    def run(self, plan: Plan) -> None:
        """Run both phases; the first contenders import their packages during the first phase."""
        repeated = plan.repeated
        queue = [*plan.turns, *([repeated] if repeated else [])]
        self._fill(queue, 0)
        self._beside(plan.beside)
        rates: list[float] = []
        for place, item in enumerate(queue):
            spare = repeated.seconds if repeated and item is not repeated else 0.0
            started = self._waiting.pop(place, None)
            if self._left() < max(item.seconds + spare, _LAST_START):
                self._skip(item, started)
                continue
            started = started or self._start(item)
            self._fill(queue, place + 1)
            line = self._turn(started)
            if (item is plan.first or item is repeated) and "tokens_per_second" in line:
                rates.append(line["tokens_per_second"])
        if len(rates) == 2:
            self._say(f"the first contest and its repetition differ by {abs(rates[1] / rates[0] - 1):.1%}")

    def stop_all(self) -> None:
        """Kill all processes that are not finished."""
        for started in self._started:
            _kill(started.process)

    def _fill(self, queue: list[Item], first: int) -> None:
        """Start the contenders of the next turns; they import their packages and wait."""
        for place in range(first, min(first + _WAITING, len(queue))):
            if queue[place].contest and place not in self._waiting and self._left() > _LAST_START:
                self._waiting[place] = self._start(queue[place])

    def _beside(self, items: list[Item]) -> None:
        running = [self._start(item) for item in items]
        for started in running:
            started.turn.touch()
        while running:
            for started in running:
                ended = started.process.poll() is not None
                late = time.monotonic() - started.start > started.item.limit or self._left() < _LAST_STOP
                if ended or late:
                    self._finish(started, "beside")
            running = [started for started in running if started in self._started]
            time.sleep(0.1)

    def _turn(self, started: Started) -> Line:
        start = time.monotonic()
        started.turn.touch()
        with suppress(subprocess.TimeoutExpired):
            started.process.wait(max(0.0, min(started.item.limit, self._left() - _LAST_STOP)))
        return self._finish(started, "turns", time.monotonic() - start)

    def _start(self, item: Item) -> Started:
        self._number += 1
        files = {name: self._work / f"{self._number}.{name}" for name in ("result", "lines", "log", "turn")}
        if item.contest:
            contest = self._work / f"{self._number}.contest"
            contest.write_text(item.contest.as_json())
            command = [
                sys.executable,
                "-m",
                "scripts.bench.measure",
                *map(str, (contest, files["result"], files["turn"])),
            ]
        else:
            seconds = min(item.limit, self._left()) - _LAST_START
            values = {"python": sys.executable, "device": self._options.device, "lines": files["lines"]}
            command = [word.format(**values, seconds=f"{seconds:.0f}") for word in item.command]
        with files["log"].open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._work if item.contest else ROOT,  # Unsloth writes into the current folder
                env=os.environ | self._environment(item),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started = Started(item=item, process=process, start=time.monotonic(), **files)
        self._started.append(started)
        return started

    def _environment(self, item: Item) -> dict[str, str]:
        is_unsloth = item.contest is not None and item.contest.framework == "unsloth"
        site = self._work / ("site-unsloth" if is_unsloth else "site")
        variables = environment(self._options.device, item.threads)
        return {
            **variables,
            "PYTHONPATH": os.pathsep.join([str(site), variables["PYTHONPATH"]]),
            "PYTHONUNBUFFERED": "1",
            "APP_PYTHON": sys.executable,
            "BENCH_FAILURES": str(self._out / "failures.txt"),
        }

    def _finish(self, started: Started, phase: str, took: float | None = None) -> Line:
        """Kill remaining processes of the item, write its lines and the end of its log, and return its own line."""
        item, was_running = started.item, started.process.poll() is None
        took = time.monotonic() - started.start if took is None else took
        _kill(started.process)
        self._started.remove(started)
        code, log = started.process.returncode, started.log.read_bytes()[-_LOG_BYTES:]
        error = f"stopped after {took:.0f} s" if was_running else f"exit code {code}: {_last_words(log)}"
        line: Line = {"phase": phase, "name": item.name, "took_seconds": round(took, 1)}
        if item.contest and started.result.exists():
            line |= json.loads(started.result.read_text())
        elif item.contest:
            line |= asdict(item.contest) | {"error": error}
        else:
            line |= {"returncode": code, **({"error": error} if code else {"said": _last_words(log)})}
        self.complete &= "error" not in line
        lines = started.lines.read_text().splitlines() if started.lines.exists() else []
        self._append("lines.jsonl", "".join(f"{text}\n" for text in [*lines, json.dumps(line)]))
        with (self._out / f"{phase}.log").open("ab") as file:
            file.write(f"\n##### {item.name}: exit code {code}, {took:.1f} s\n".encode() + log)
        self._say(f"{phase}: {item.name}: {_words(line)}, took {took:.1f} s")
        return line

    def _skip(self, item: Item, started: Started | None) -> None:
        self._say(f"skipped, no time left: {item.name}")
        self.complete = False
        if started:
            _kill(started.process)
            self._started.remove(started)

    def _seconds(self) -> float:
        return time.monotonic() - self._start_time

    def _left(self) -> float:
        return self._start_time + self._limit - time.monotonic()

    def _say(self, words: str) -> None:
        line = f"[{self._seconds():5.1f}] {words}"
        print(line, flush=True)
        self._append("phases.txt", f"{line}\n")

    def _append(self, name: str, text: str) -> None:
        with (self._out / name).open("a", encoding="utf-8") as file:
            file.write(text)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, so that the device is free for the next item."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: bytes) -> str:
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _words(line: Line) -> str:
    if "error" in line:
        return str(line["error"])
    if "tokens_per_second" not in line:
        return str(line["said"])
    clock, verified = line["gpu"], line["verified"]
    words = [f"{line['tokens_per_second']:,.0f} tokens/s", f"{line['peak_memory_bytes'] / 1e9:.1f} GB"]
    if line["planned_memory_bytes"]:
        words.append(f"estimated {line['planned_memory_bytes'] / 1e9:.1f} GB")
    if clock["sm_mhz"]:
        words.append(f"{clock['sm_mhz']:.0f} MHz, {clock['watts']:.0f} W")
    if verified:
        words.append(f"{verified['measured']} ({verified['result']})")
    return ", ".join(words)


if __name__ == "__main__":
    main()
