"""Pages in a real browser: shown in frames of a page of our own, which measures them and writes down what it finds."""

import json
import re
import subprocess
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--allow-file-access-from-files",  # or a frame could not be measured
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--hide-scrollbars",
)
_DARK = ("--blink-settings=preferredColorScheme=0", "--force-dark-mode")
_MEASURE = """
const channels = text => {
  const numbers = text.match(/[\\d.e-]+/g).map(Number);
  return text.startsWith('color(') ? numbers.map((n, i) => i < 3 ? n * 255 : n) : numbers;
};
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(
  v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce(
  (s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const ground = (view, node) => {
  for (; node; node = node.parentElement) {
    const color = channels(view.getComputedStyle(node).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const measure = frame => {
  const view = frame.contentWindow, page = frame.contentDocument;
  for (const each of page.querySelectorAll('details')) each.open = true;
  let worst = [99, ''], texts = 0;
  for (const node of page.body.querySelectorAll('*')) {
    const own = [...node.childNodes].filter(n => n.nodeType === 3 && n.data.trim()).map(n => n.data).join('');
    if (!own || ['title', 'style', 'script'].includes(node.tagName.toLowerCase())) continue;
    const style = view.getComputedStyle(node);
    const is_svg = node.namespaceURI.endsWith('svg');
    const found = contrast(channels(is_svg ? style.fill : style.color), ground(view, node));
    texts += 1;
    if (found < worst[0]) worst = [found, node.tagName + ' ' + own.slice(0, 40)];
  }
  let faint = [99, ''];
  for (const node of page.querySelectorAll('.line, .dot, .bar, .gap')) {
    const style = view.getComputedStyle(node);
    const found = contrast(channels(/rect|circle/.test(node.tagName) ? style.fill : style.stroke), ground(view, node));
    if (found < faint[0]) faint = [found, node.getAttribute('class')];
  }
  const tooltips = [];
  for (const chart of page.querySelectorAll('svg.hover')) {
    chart.scrollIntoView();
    const box = chart.getBoundingClientRect();
    for (const x of [.001, .2, .5, .8, .999]) for (const y of [.05, .95]) {
      const node = page.elementFromPoint(box.left + x * box.width, box.top + y * box.height);
      tooltips.push(node.parentElement.querySelector(':scope > title')?.textContent ?? '');
    }
  }
  const lines = [...page.querySelectorAll('polyline')].map(line => line.getBoundingClientRect().width);
  return {
    title: page.title,
    wide: page.documentElement.scrollWidth, room: page.documentElement.clientWidth, texts,
    worst, faint, tooltips,
    dark: view.matchMedia('(prefers-color-scheme: dark)').matches,
    background: channels(view.getComputedStyle(page.body).backgroundColor),
    asked: view.performance.getEntriesByType('resource').map(entry => entry.name),
    elements: [...new Set([...page.querySelectorAll('*')].map(node => node.tagName.toLowerCase()))],
    longest: Math.max(0, ...lines),
  };
};
const all = () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.id] = measure(frame);
  document.querySelector('#found').textContent = JSON.stringify(found);
};
"""


def printed_pages(folder: Path, page: Path) -> int:
    """Return the number of sheets on which the browser prints a page."""
    target = folder / "printed.pdf"
    subprocess.run(
        [
            "chromium",
            *_FLAGS,
            *_DARK,
            f"--user-data-dir={folder / 'browser-print'}",
            f"--print-to-pdf={target}",
            page.as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    return len(re.findall(rb"/Type /Page\b", target.read_bytes()))


def looked_at(folder: Path, pages: Mapping[str, tuple[Path, int]], *, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """What was measured of each page at a width, and what the browser's console said."""
    frames = "".join(
        f'<iframe id="{name}" src="{page.as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>'
        for name, (page, width) in pages.items()
    )
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="found"></pre>{frames}<script>{_MEASURE}onload = all</script>'
    )
    ended = subprocess.run(
        [
            "chromium",
            *_FLAGS,
            *(_DARK if dark else ()),
            f"--user-data-dir={folder / f'browser-{dark}'}",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = ended.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    said = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(unescape(found)), said
