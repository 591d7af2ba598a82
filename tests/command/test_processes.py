"""Several processes train as one does: the same numbers, the same files, one message when something is wrong."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.runs import SMALL, Zygote, has_reached, same_numbers, tensors, wait_until
from tests.model.small import distance

PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.5", "training.clip=0", "schedule=constant")
GONE = 137  # 128 + SIGKILL


def with_rate(count: int) -> str:
    """Micro-batches of each process, so that a step is the same."""
    return f"batching.accumulation={4 // count}"


def test_two_processes_give_the_numbers_of_one(zygote: Zygote, tmp_path: Path) -> None:
    check_two_against_one(zygote, tmp_path, "full", "true", "ddp")


def check_two_against_one(zygote: Zygote, tmp_path: Path, recipe: str, packing: str, parallel: str) -> None:
    """Plain gradient descent: LoRA's B begins at zero, so what comes out is the sum of the gradients."""
    command = (*SMALL, *PLAIN, f"recipe={recipe}", f"batching.packing={packing}", "training.max_steps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    zygote.finish(tmp_path, *command, with_rate(1), f"output_dir={one}")
    zygote.finish_together(tmp_path, 2, *command, with_rate(2), f"parallel={parallel}", f"output_dir={two}")
    same_numbers(one, two)
    left, right = tensors(one), tensors(two)
    for half in ("lora_A", "lora_B") if recipe != "full" else ("",):
        chosen = [name for name in left if half in name]
        assert chosen
        assert distance([right[n] for n in chosen], [left[n] for n in chosen]) <= 1e-6
    assert json.loads((two / "manifest.json").read_text())["choices"]["processes"] == 2
    assert "shared by 2 processes" in (two / "log-rank-1.txt").read_text()


class Launched:
    """The real command: one process that starts the others."""

    def __init__(
        self, folder: Path, environment: dict[str, str], *arguments: str, launcher: Sequence[str] = ()
    ) -> None:
        self._errors, self._said = folder / "launched.txt", folder / "said.txt"
        with self._errors.open("w") as errors, self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "app.train", *arguments],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
            )

    def until(self, run: Path, step: int) -> None:
        deadline = time.monotonic() + 120
        while not has_reached(run, step):
            assert self.process.poll() is None, self._errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def workers(self, count: int) -> list[int]:
        """Wait until they have been started."""
        wait_until(lambda: len(self._children()) >= count, 60, self._errors.read_text)
        return self._children()

    def _children(self) -> list[int]:
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids]

    def worker(self, rank: int) -> int:
        for pid in self._children():
            if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        raise AssertionError(rank)

    def last_line(self) -> str:
        return self._said.read_text().splitlines()[-1]

    def ended(self, within: float = 60) -> tuple[int, str]:
        return self.process.wait(timeout=within), self._errors.read_text()


def test_fault_of_all_processes_is_reported_once(quick_zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    bad = ("dataset=messages", "dataset.path=bad.jsonl", "output_dir=run")
    ended = quick_zygote.run_together(tmp_path, 2, *bad)
    assert [each.code for each in ended] == [2, 2]
    said = "".join(each.stderr for each in ended)
    assert said.startswith("error: bad.jsonl:1")
    assert said.count("bad.jsonl:1") == 1
    launched = quick_zygote.run(tmp_path, *bad, "launch.num_processes=2", code=2)
    assert launched.stderr.count("bad.jsonl:1") == 1
    assert re.search(r"\(process [01] of 2\)\n$", launched.stderr)


def test_processes_with_other_settings_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    runs = zygote.start_together(tmp_path, 2, *SMALL, "output_dir=run", "seed=${oc.env:RANK}")
    ended = [run.wait() for run in runs]
    assert [end.code for end in ended] == [2, 2]
    said = "".join(end.stderr for end in ended)
    assert said.count("the processes of this run differ (the settings (as a hash):") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
