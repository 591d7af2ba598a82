"""Run a ladder on this machine: its rungs in order until the deadline, with a JSON line per rung.

python -m scripts.bench.ladder NAME --out FILE.jsonl [--device cpu] [--tiny] [--deadline SECONDS] [key=value...]

The sweep folder is FILE without suffix; its ladder.md has the tables.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.pages.ladder_tables import measured_tables
from app.pages.page import Page, as_markdown

_STOPPING_SECONDS = 25.0  # for a rung to save and end
_STOPPED = 75


def main() -> None:
    """Exit with the code of the sweep, or 0 if the deadline stopped it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("settings", nargs="*", help="settings of the command line, for all rungs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and three steps")
    parser.add_argument("--deadline", type=float, help="seconds from now")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_intermixed_args()
    folder = options.out.with_suffix("")
    code = _run(options, folder)
    content = json.loads((folder / "sweep.json").read_text()) if (folder / "sweep.json").is_file() else {}
    ladder = content.get("ladder", {"source": "", "rungs": []})
    with options.out.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in _lines(options, ladder))
    (folder / "ladder.md").write_text(as_markdown(Page(options.name, measured_tables(ladder))))
    statuses = [rung["status"] for rung in ladder["rungs"]]
    print(f"{options.name}: {statuses.count('finished')} of {len(statuses)} rungs finished")
    sys.exit(0 if code == _STOPPED else code)


def _run(options: argparse.Namespace, folder: Path) -> int:
    small = ("sweep.size=small", "training.max_steps=3") if options.tiny else ()
    command = [sys.executable, "-m", "app.train", "-m", f"sweep={options.name}", *small, *options.settings]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    process = subprocess.Popen([*command, f"output_dir={folder}"], env=os.environ | hidden)
    if options.deadline is None:
        return process.wait()
    ends = time.monotonic() + options.deadline
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(options.deadline - _STOPPING_SECONDS, options.deadline / 2))
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(1.0, ends - time.monotonic()))
    process.kill()
    process.wait()
    return _STOPPED


def _lines(options: argparse.Namespace, ladder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line per rung, with `error` if it was neither finished nor rejected."""
    import torch

    from scripts.bench.machine import here

    facts = here(torch.device(options.device))
    lines = []
    for rung in ladder["rungs"]:
        line = {"ladder": options.name, "item": rung["name"], "tiny": options.tiny, "settings": options.settings}
        if rung["status"] not in ("finished", "refused"):
            line["error"] = rung["error"] or f"{rung['status']} at the deadline"
        lines.append({**line, "rung": rung, **facts})
    return lines


if __name__ == "__main__":
    main()
