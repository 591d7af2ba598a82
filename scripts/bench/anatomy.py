"""Pictures of what `app.check memory` found: the parts of the peak side by side, and the places of a step.

python -m app.check memory model=llama recipe=lora hardware=h100 output_dir=checks/lora
python scripts/bench/anatomy.py --parts parts.svg --places places.svg '8B lora on an H100=checks/lora/check.json' ...
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, or as a module

from app.record.lines import memory
from app.record.memory_screen import PARTS, parts_of
from scripts.bench.bars import BAR, WIDTH, drawing, picture

Facts = Mapping[str, Any]
_LABEL, _NUMBER = 230, 70
_ROOM = WIDTH - _LABEL - _NUMBER
_IN_A_ROW = 3  # names of the legend
# of weights, of what training adds to them, of a pass, and of what lies on top of the peak
_COLOURS = {
    "frozen_weights": "#7b8fa6",
    "quantization_constants": "#4f6179",
    "trained_weights": "#2a9d6a",
    "gradients": "#8fd0a8",
    "optimizer_states": "#1d6b49",
    "borrowed_weights": "#b5c4d6",
    "saved_activations": "#e0a030",
    "temporary": "#c96a2b",
    "loss_head": "#8e3b2f",
    "buckets_bytes": "#5a4a8a",
    "lost_bytes": "#bbbbbb",
    "context_bytes": "#999999",
    "margin_bytes": "#dddddd",
}
_STYLE = "text{font:13px sans-serif;fill:#333}line{stroke:#c00;stroke-width:2}" + "".join(
    f".{name}{{fill:{colour}}}" for name, colour in _COLOURS.items()
)


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="+", metavar="NAME=FILE", help="what to call it, and its check.json")
    parser.add_argument("--parts", type=Path, help="an SVG file: the peak of each in its parts, on one scale")
    parser.add_argument("--places", type=Path, help="an SVG file: how much there is at each place of a step")
    told = parser.parse_args()
    checks = {name: _read(Path(file)) for name, _, file in (each.rpartition("=") for each in told.checks)}
    if told.parts:
        told.parts.write_text(of_parts(checks))
    if told.places:
        told.places.write_text(of_places(checks))


def _read(file: Path) -> Facts:
    facts: Facts = json.loads(file.read_text())["memory"]
    return facts


def of_parts(checks: Mapping[str, Facts]) -> str:
    """A bar for each, of all that it needs; a line where the memory of its machine ends."""
    widest = max(max(facts["needed_bytes"], facts["memory_bytes"]) for facts in checks.values())
    bars = [_bar(name, facts, _ROOM / widest) for name, facts in checks.items()]
    used = {name for facts in checks.values() for name, _ in parts_of(facts)}
    return drawing([*bars, *_legend([name for name in PARTS if name in used])], _STYLE)


def of_places(checks: Mapping[str, Facts]) -> str:
    """For each a bar for each place, its peak marked."""
    groups = {name: facts["phases"] for name, facts in checks.items()}
    return picture(groups, memory, lambda title, place: place == checks[title]["peak_where"])


def _bar(name: str, facts: Facts, scale: float) -> str:
    drawn, at = [f'<text x="{_LABEL - 8}" y="15" text-anchor="end">{escape(name)}</text>'], float(_LABEL)
    for part, size in parts_of(facts):
        width = size * scale
        told = f"<title>{PARTS[part]}: {memory(size)}</title>"
        drawn.append(f'<rect class="{part}" x="{at:.1f}" width="{width:.1f}" height="{BAR}">{told}</rect>')
        at += width
    end = _LABEL + facts["memory_bytes"] * scale
    drawn.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="-2" y2="{BAR + 2}"/>')
    drawn.append(f'<text x="{max(at, end) + 6:.1f}" y="15">{memory(facts["needed_bytes"])}</text>')
    return "".join(drawn)


def _legend(parts: list[str]) -> Iterator[str]:
    step = WIDTH // _IN_A_ROW
    for first in range(0, len(parts), _IN_A_ROW):
        yield "".join(
            f'<rect class="{part}" x="{column * step + 8}" y="4" width="12" height="12"/>'
            f'<text x="{column * step + 26}" y="15">{PARTS[part]}</text>'
            for column, part in enumerate(parts[first : first + _IN_A_ROW])
        )


if __name__ == "__main__":
    main()
