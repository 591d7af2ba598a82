"""Speeds as horizontal bars, in SVG."""

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

_WIDTH, _BAR, _GAP, _LABEL, _NUMBER = 720, 20, 4, 150, 130
_STYLE = "text{font:13px sans-serif;fill:#333}rect{fill:#9ab}.ours{fill:#2a6}"


def picture(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Tokens a second of each contender, group below group, each as wide as its fastest."""
    rows = [row for title, rates in groups.items() for row in _rows(title, rates)]
    height = len(rows) * (_BAR + _GAP) + 2 * _GAP
    drawn = "".join(
        f'<g transform="translate(0 {_GAP + i * (_BAR + _GAP)})">{row}</g>' for i, row in enumerate(rows)
    )
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{drawn}</svg>\n'


def _rows(title: str, rates: Mapping[str, float]) -> Iterator[str]:
    yield f'<text y="15">{escape(title)}</text>'
    for name, rate in rates.items():
        width = (_WIDTH - _LABEL - _NUMBER) * rate / max(rates.values())
        kind = ' class="ours"' if name == "ours" else ""
        yield (
            f'<text x="{_LABEL - 8}" y="15" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LABEL}" width="{width:.1f}" height="{_BAR}"{kind}/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="15">{rate:,.0f} tokens/s</text>'
        )
