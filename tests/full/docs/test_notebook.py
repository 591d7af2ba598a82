"""The notebook of docs/, executed in a kernel of its own."""

import json
import os
from pathlib import Path

from tests.conftest import REPO
from tests.harness.marks import requires_nbclient
from tests.harness.python import printed_by

NOTEBOOK = REPO / "docs" / "first_run.ipynb"
EXECUTE = """
import sys
import nbclient, nbformat
book = nbformat.read(sys.argv[1], 4)
for cell in book.cells:  # other tests have the other cores
    cell.source = cell.source.replace("record.every", "launch.threads=1 record.every")
nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
nbformat.write(book, "executed.ipynb")
"""


@requires_nbclient
def test_notebook_runs_to_a_proven_export(tmp_path: Path, app_env: dict[str, str], quick_python: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(quick_python)
    finetune = tmp_path / "bin" / "finetune"
    finetune.write_text(f'#!/usr/bin/env bash\nexec "{tmp_path}/bin/python" -m app "$@"\n')
    finetune.chmod(0o755)
    env = app_env | {"PATH": f"{tmp_path}/bin{os.pathsep}{app_env['PATH']}", "HOME": str(tmp_path)}
    printed_by("-W", "ignore", "-c", EXECUTE, str(NOTEBOOK), cwd=tmp_path, env=env)
    cells = {each["id"]: each for each in json.loads((tmp_path / "executed.ipynb").read_text())["cells"]}
    said = {
        name: "".join(line for output in cell.get("outputs", []) for line in output.get("text", ""))
        for name, cell in cells.items()
    }
    assert not [name for name, text in said.items() if "\x1b" in text or "Traceback" in text]
    assert "Did you mean optimizer.lr?" in said["check"]
    assert "done    " in said["train"]
    assert "'status': 'finished'" in said["result"]
    assert said["ask"].strip()
    assert json.loads((tmp_path / "exports" / "first" / "export.json").read_text())["passed"]
