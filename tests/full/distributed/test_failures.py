"""A process that cannot go on ends the others, where nothing else would wake them."""

import os
import sys
import time
from pathlib import Path

from app.distributed.launch import FailureFlag
from tests.harness.runs import Zygote

UNFINISHED = 75
STAYS_SECONDS = 15.0
WITHIN_SECONDS = 5.0


def main() -> None:
    """Process 1 raises the flag and stays alive; the others wait for it in a collective."""
    from app.config.schema import LaunchConfig
    from app.distributed.process_group import start

    runtime = start(LaunchConfig(num_processes=1, threads=1), "fp32", 0)
    if runtime.rank != 1:
        runtime.host_group.wait_for_all()
    FailureFlag(1).raise_first(UNFINISHED, "out of memory", has_met=True)
    Path(sys.argv[1]).write_text(str(time.time()))
    time.sleep(STAYS_SECONDS)
    os._exit(UNFINISHED)


def test_failure_flag_ends_processes_that_wait_in_a_collective(zygote: Zygote, tmp_path: Path) -> None:
    raised = tmp_path / "raised"
    runs = zygote.start_together(tmp_path, 3, str(raised), module="tests.full.distributed.test_failures")
    assert [runs[rank].wait().code for rank in (0, 2)] == [UNFINISHED] * 2
    assert time.time() - float(raised.read_text()) < WITHIN_SECONDS
    runs[1].kill()
