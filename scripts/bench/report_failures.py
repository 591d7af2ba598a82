"""pytest plugin that appends each failure to the file BENCH_FAILURES as it happens, since a session may be stopped.

pytest -p scripts.bench.report_failures
"""

import os
from pathlib import Path
from typing import Any

_CHARACTERS = 6000  # of a traceback


def pytest_runtest_logreport(report: Any) -> None:
    """Append a failed report; xdist calls this in its workers too."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        heading = f"##### {report.nodeid} [{report.when}] {report.duration:.1f} s"
        with Path(os.environ["BENCH_FAILURES"]).open("a", encoding="utf-8") as file:
            file.write(f"\n{heading}\n{report.longreprtext[-_CHARACTERS:]}\n")
