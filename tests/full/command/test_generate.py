"""Asking a finished run: one prompt, a file of them, a conversation, and the base beside it."""

import subprocess
import sys
from pathlib import Path

from tests.harness.runs import FinishedRuns


def test_conversation_over_a_pipe(finished: FinishedRuns, tmp_path: Path, app_env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.generate", f"run={finished()}", "max_new_tokens=3"],
        input="Hi\n/undo\nHi\n/quit\nnever asked\n",
        env=app_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *answers = done.stdout.splitlines()
    assert first.startswith("/new starts a new conversation")
    assert len(answers) == 2
    assert answers[0] == answers[1]
