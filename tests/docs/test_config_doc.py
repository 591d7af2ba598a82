"""docs/config.md names every choice of every group."""

import re

from app.config.groups import CONF
from tests.conftest import REPO


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
