"""Documents: links, files, choices and messages that they name; tables that are made; the length of lines."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from app.config.conf_files import CONF
from scripts import make_keys, make_techniques
from scripts.make_models import UNKNOWN, models
from tests.conftest import REPO
from tests.docs.blocks import documents

PAGES = [*documents(), REPO / "ARCHITECTURE.md", REPO / "AGENTS.md"]
PACKAGES = [*(REPO / "app").glob("*/__init__.py"), REPO / "app" / "config" / "tasks.py"]
MAX_LINE_CHARACTERS = 120  # but for tables, whose rows cannot be wrapped


def anchors(page: Path) -> set[str]:
    """Those that Markdown is rendered with."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_to_what_exists(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, *PACKAGES], ids=lambda page: str(page.relative_to(REPO)))
def test_files_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:app|conf|docs|scripts|tests|\.ci|\.devcontainer)/[a-z0-9_./-]*)`", page.read_text())
    assert [name for name in named if not (REPO / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_lines_are_short(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_LINE_CHARACTERS] == []


def _rows(heading: str) -> list[tuple[str, str]]:
    """The first two cells of the table below a heading."""
    text = (REPO / "docs" / "config.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(cell[0], cell[1]) for cell in cells]


def test_config_page_names_every_choice_of_every_group() -> None:
    told = {}
    for groups, choices in _rows("Groups"):
        for group, part in zip(re.findall(r"`([^`]+)`", groups), choices.split(";"), strict=False):
            told[group] = set(re.findall(r"`([^`]+)`", part if "," in groups else choices))
    files = {
        folder.name: {file.stem for file in folder.glob("*.yaml") if not file.stem.startswith("_")}
        for folder in CONF.iterdir()
        if folder.is_dir()
    }
    left_out = {"model": {"folder"}}  # model.path= chooses it
    missing = {group: names - told.get(group, set()) - left_out.get(group, set()) for group, names in files.items()}
    assert {group: names for group, names in missing.items() if names} == {}


def _quoted() -> list[str]:
    """The messages in the first column, in the parts that a value or a gap leaves."""
    rows = re.findall(r"^\| (.*?) \| ", (REPO / "docs" / "problems.md").read_text(), re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row) if " " in quote]
    return [part.strip() for quote in quotes for part in quote.split("...")]


def _texts() -> list[str]:
    """Every text in the program, and the scripts."""
    trees = [ast.parse(file.read_text()) for file in (REPO / "app").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [str(node.value) for node in nodes] + [(REPO / "scripts" / "setup").read_text()]


def test_quoted_messages_are_in_the_program() -> None:
    quoted, texts = _quoted(), _texts()
    assert len(quoted) > 8
    assert [part for part in quoted if not any(part in text for text in texts)] == []


MADE = [(file, page, script.__name__) for script in (make_keys, make_techniques) for file, page in script.PAGES.items()]


@pytest.mark.parametrize(("file", "page", "script"), MADE, ids=[file.name for file, _, _ in MADE])
def test_page_is_fresh(file: Path, page: Callable[[], str], script: str) -> None:
    assert file.read_text() == page(), f"run python -m {script}"


def test_models_page_names_every_model() -> None:
    text = (REPO / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", text, re.MULTILINE))
    assert list(rows) == models()
    for name, row in rows.items():
        told = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
        assert row.startswith(f"{told['path']} | ")
        assert (UNKNOWN in row) == (told["architecture"] == {})


def test_readme_memory_table_equals_the_models_page() -> None:
    def cells(page: Path) -> dict[str, set[str]]:
        rows = [line for line in page.read_text().splitlines() if line.startswith("|") and " GB, " in line]
        return {re.findall("`(.+?)`", row)[0]: set(re.findall(r"[\d.]+ GB, [^|]+(?= \|)", row)) for row in rows}

    shown, all_models = cells(REPO / "README.md"), cells(REPO / "docs" / "models.md")
    assert len(shown) > 8
    assert shown == {name: all_models[name] for name in shown}


def test_python_example_of_the_readme_trains_and_loads(tmp_path: Path) -> None:
    code = (REPO / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    code = code.replace("max_steps=20", "max_steps=1").replace('"recipe=lora"', '"recipe=lora", "debug=fast"')
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    script = f"{code}\nassert exit_code == 0\nassert model.peft_config"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
