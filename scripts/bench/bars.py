"""Numbers as horizontal bars, in SVG."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from xml.sax.saxutils import escape

WIDTH, BAR, GAP = 720, 20, 4
_LABEL, _LETTER, _NUMBER = 150, 7, 130
_STYLE = "text{font:13px sans-serif;fill:#333}rect{fill:#9ab}.marked{fill:#2a6}"


def rate(value: float) -> str:
    """A speed in words."""
    return f"{value:,.0f} tokens/s"


def picture(
    groups: Mapping[str, Mapping[str, float]],
    told: Callable[[float], str] = rate,
    marked: Callable[[str, str], bool] = lambda _title, name: name == "ours",
) -> str:
    """What each of a group has, group below group, each as wide as its largest."""
    names = (name for sizes in groups.values() for name in sizes)
    label = max([_LABEL, *(_LETTER * len(name) + 12 for name in names)])
    rows = (row for title, sizes in groups.items() for row in _rows(title, sizes, label, told, marked))
    return drawing(rows, _STYLE)


def drawing(rows: Iterable[str], style: str) -> str:
    """Rows below one another."""
    placed = [
        f'<g transform="translate(0 {GAP + at * (BAR + GAP)})">{row}</g>' for at, row in enumerate(rows)
    ]
    height = len(placed) * (BAR + GAP) + 2 * GAP
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    ground = 'style="background:#fff"'  # a reader's page may be dark
    inside = f"<style>{style}</style>{''.join(placed)}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {ground}>{inside}</svg>\n'


def _rows(
    title: str,
    sizes: Mapping[str, float],
    label: int,
    told: Callable[[float], str],
    marked: Callable[[str, str], bool],
) -> Iterator[str]:
    yield f'<text y="15">{escape(title)}</text>'
    for name, size in sizes.items():
        width = (WIDTH - label - _NUMBER) * size / max(sizes.values())
        kind = ' class="marked"' if marked(title, name) else ""
        yield (
            f'<text x="{label - 8}" y="15" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{label}" width="{width:.1f}" height="{BAR}"{kind}/>'
            f'<text x="{label + width + 6:.1f}" y="15">{escape(told(size))}</text>'
        )
