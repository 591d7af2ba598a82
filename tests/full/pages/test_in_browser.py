"""Pages as Chromium shows them: nothing is asked for, nothing is too wide, everything can be read."""

import math
from pathlib import Path

import pytest

from app.pages.check_report import check_page
from app.pages.comparison_page import comparison_page
from app.pages.read_run import read_sweep
from app.pages.run_page import run_page
from app.pages.sweep_page import sweep_page
from tests.full.pages.browser import looked_at
from tests.harness.marks import requires_chromium
from tests.pages.facts import DATA, TOO_LARGE
from tests.pages.folders import made_run, made_sweep, result_of, sample, step, trial
from tests.pages.test_render import HOSTILE

pytestmark = requires_chromium
PHONE, DESK = 360, 1200
LONG = "an-unbroken-word-" * 40


def pages(folder: Path) -> dict[str, Path]:
    lines = [step(at, None if at == 70 else 3 + math.cos(at / 9)) for at in range(1, 200)]
    lines += [{"step": at, "epoch": at / 100, "eval_loss": 4 - at / 90} for at in range(40, 200, 40)]
    texts = [sample(at, prompt, "4", "4") for at in (0, 199) for prompt in (LONG, HOSTILE, "2+2?")]
    failed = result_of(lines, "failed", error=f"error: {LONG}")
    run = made_run(folder / "run", lines, samples=texts, result=failed)
    other = made_run(folder / LONG[:120], lines[:90], samples=texts)
    keys = [(lr, r) for lr in ("1e-4", "1e-3", "1e-2") for r in ("4", "16", "64")]
    trials = [
        trial(n, [f"optimizer.lr={lr}", f"adapter.r={r}"], 3 + n / 7 if n != 5 else None, error=f"error: {LONG}")
        for n, (lr, r) in enumerate(keys, 1)
    ]
    trials += [trial(10, ["optimizer.lr=1", "adapter.r=1"], None, status=each) for each in ("pending", "running")]
    sweep = made_sweep(folder / "sweep", trials)
    content = read_sweep(sweep)
    assert content is not None
    made = {
        "run": run_page(run),
        "sweep": sweep_page(sweep, content, folder / "sweep.html"),
        "comparison": comparison_page([run, other]),
        "check": check_page({"data": DATA}),
        "check-memory": check_page({"data": DATA, "memory": TOO_LARGE}),
        "check-spoilt": check_page({"data": {**DATA, "source": LONG, "stops": [LONG], "notes": [HOSTILE]}}),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("dark", [False, True])
def test_pages_load_nothing_and_fit_phone(tmp_path: Path, dark: bool) -> None:
    shown = {f"{name}-{width}": (file, width) for name, file in pages(tmp_path).items() for width in (PHONE, DESK)}
    found, said = looked_at(tmp_path, shown, dark=dark)
    assert said == []
    assert found.keys() == shown.keys()
    for name, page in found.items():
        assert page["asked"] == [], name
        assert page["wide"] == page["room"] == shown[name][1], name
        assert not {"script", "img", "iframe", "link", "object"} & set(page["elements"]), name
        assert page["texts"] > 30, name
        assert page["dark"] == dark
        assert (sum(page["background"]) < 150) == dark, page["background"]
        assert page["worst"][0] >= 4.5, (name, page["worst"])
        assert page["faint"][0] >= 3, (name, page["faint"])
        assert page["longest"] > shown[name][1] / 3 or name.startswith(("sweep", "check")), name


def test_content_security_policy_blocks_script(tmp_path: Path) -> None:
    """As if an element had slipped into a page."""
    page = run_page(made_run(tmp_path / "run", [step(1, 3.0)]))
    slipped = "<img src='http://nowhere.invalid/x.png'><script>document.title = 'taken'</script></main>"
    (tmp_path / "run.html").write_text(page.replace("</main>", slipped))
    found, said = looked_at(tmp_path, {"run": (tmp_path / "run.html", PHONE)}, dark=False)
    assert found["run"]["title"] == "run: finished"
    assert len([line for line in said if "Content Security Policy" in line]) == 2
