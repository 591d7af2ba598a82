"""Plugin of pytest that writes each failure to the file BENCH_FAILURES at once; a session may be stopped early.

pytest -p scripts.bench.report_failures
"""

import os
from pathlib import Path
from typing import Any

_CHARACTERS = 6000  # of a traceback


def pytest_runtest_logreport(report: Any) -> None:
    """Called for each phase of each test, with xdist in its workers and in the main process."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        heading = f"##### {report.nodeid} [{report.when}] {report.duration:.1f} s"
        with Path(os.environ["BENCH_FAILURES"]).open("a", encoding="utf-8") as file:
            file.write(f"\n{heading}\n{report.longreprtext[-_CHARACTERS:]}\n")
