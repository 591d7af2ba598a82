"""Create docs/pictures/ for README.md and docs/report.md from real runs, with headless Chromium.

python -m scripts.make_pictures [FOLDER]

Output and runs of an earlier call in FOLDER are reused. Times and paths are removed.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from rich.console import Console
from rich.text import Text

from app.program import STARTED_AS

REPO = Path(__file__).resolve().parents[1]
PICTURES = REPO / "docs" / "pictures"
SHOWN = PICTURES / "terminal.txt"  # text of the picture
MADE_OF = PICTURES / "made_of.sha256"
_WIDTH, _REPORT_SIZE, _BOARD_SIZE = 100, "1200,1262", "1200,835"
# commands, and patterns for the shown lines of their output
_COMMANDS = {
    "train recipe=qlora model=llama optimizer.lrr=3e-4 dataset.max_len=1024 lora_alpha=16": ".+",
    "check memory model=llama hardware=rtx3090 training.recompute=false": (
        r"(memory|peak|needs) .+| +(frozen|saved act).+|(options| +training.recompute=true| +recipe=qlora).*\n.+"
    ),
    "train output_dir=runs/first": r"(model|steps|done) .+|prompt +expected .+(\n.+){4}",
}
_COLORS = {
    r"^\$ .*": "bold",
    r"^error:": "bold red",
    r"does not fit": "bold red",
    r"\(enough\)": "bold green",
    r"^done": "bold green",
}
_KINDS = {"Programming Language :: Python :: 3.": "Python", "Operating System :: ": "system"}  # classifiers
# hides start time, host and path, and the tiles of time and speed
_HIDDEN = "<style>.top + p + p, .tile:nth-child(4), .tile:nth-child(5) { display: none }</style>"
_BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" font-family="sans-serif" font-size="11">
<rect width="{width}" height="20" rx="4" fill="#166534"/><rect width="{left}" height="20" rx="4" fill="#444c56"/>
<g fill="#fff" text-anchor="middle"><text x="{x}" y="14">{name}</text><text x="{y}" y="14">{value}</text></g></svg>
"""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=5000"),
)


def made_of() -> str:
    """Return a hash of what the pictures are made of: code, templates and style of pages and board, terminal text."""
    folders = [REPO / "app" / "pages", REPO / "app" / "web"]
    sources = sorted(file for folder in folders for file in [*folder.glob("*.py"), *(folder / "templates").glob("*")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*sources, SHOWN])).hexdigest()


def badges() -> dict[str, str]:
    """Return badges for facts in pyproject.toml, by file name."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    classifiers = {
        kind: [text.rpartition(" :: ")[2] for text in project["classifiers"] if kind in text] for kind in _KINDS
    }
    (torch,) = (text.partition(">=")[2] for text in project["dependencies"] if text.startswith("torch>"))
    facts = {name: ", ".join(classifiers[kind]) for kind, name in _KINDS.items()}
    facts |= {"PyTorch": f"{torch} or newer", "license": project["license"]}
    return {f"{name.lower()}.svg": _badge(name, value) for name, value in facts.items()}


def _badge(name: str, value: str) -> str:
    left, right = (7 * len(text) + 14 for text in (name, value))
    return _BADGE.format(width=left + right, left=left, x=left / 2, y=left + right / 2, name=name, value=value)


def main() -> None:
    """Create the pictures, and write the hash of their content."""
    folder = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    parts = [
        _shown(words, _output(folder / f"{n}.txt", words), pattern)
        for n, (words, pattern) in enumerate(_COMMANDS.items())
    ]
    SHOWN.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (PICTURES / "terminal.svg").write_text(_terminal(SHOWN.read_text("utf-8")), encoding="utf-8")
    for name, badge in badges().items():
        (PICTURES / name).write_text(badge, encoding="utf-8")
    page = folder / "report.html"
    page.write_text((folder / "runs" / "first" / "report.html").read_text("utf-8") + _HIDDEN, encoding="utf-8")
    _shoot(page.as_uri(), "report.png", _REPORT_SIZE)
    _shoot_board(folder)
    MADE_OF.write_text(f"{made_of()}\n")


def _shoot(address: str, name: str, size: str) -> None:
    options = (f"--window-size={size}", f"--screenshot={PICTURES / name}")
    subprocess.run(["chromium", *_FLAGS, *options, address], check=True, stderr=subprocess.DEVNULL)


def _shoot_board(folder: Path) -> None:
    command = [sys.executable, "-m", "app.board", "runs"]
    env = {**os.environ, "PYTHONPATH": str(REPO), STARTED_AS: "finetune"}
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        _shoot(board.stdout.readline().split()[-1], "board.png", _BOARD_SIZE)
        board.terminate()


def _output(file: Path, words: str) -> str:
    """Return the output of a command run in the folder of `file`, which caches it."""
    if not file.exists():
        command = [sys.executable, "-c", "from app.main import main; main()", *words.split()]
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        ended = subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True, check=False)
        file.write_text(ended.stdout or ended.stderr, encoding="utf-8")
    return file.read_text("utf-8")


def _shown(words: str, output: str, pattern: str) -> str:
    """Return a command and the shown lines of its output, truncated to the width."""
    lines = [line for match in re.finditer(f"^(?:{pattern})$", output, re.MULTILINE) for line in match[0].splitlines()]
    short = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]
    return "\n".join([f"$ finetune {words}", *short])


def _terminal(text: str) -> str:
    """Return text as an SVG of a terminal drawn by rich, without web fonts."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in text.splitlines():
        styled = Text(line)
        for pattern, style in _COLORS.items():
            styled.highlight_regex(pattern, style)
        console.print(styled, soft_wrap=True)
    drawn = console.export_svg(title="finetune", unique_id="terminal")
    drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    return drawn.replace("<text ", '<text xml:space="preserve" ')  # librsvg drops leading spaces


if __name__ == "__main__":
    main()
