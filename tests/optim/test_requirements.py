import pytest

from app.config.groups import choices_by_group
from app.optim import requirements
from app.optim.requirements import BITSANDBYTES_KINDS, PAGED_KINDS, check, notes
from tests.optim.small import KINDS, section

PACKAGES = dict.fromkeys(BITSANDBYTES_KINDS, "pip install bitsandbytes") | {"adamw_apex": "needs the package apex"}


@pytest.mark.parametrize("kind", KINDS)
def test_check_of_installed_packages_is_empty(kind: str) -> None:
    assert check(section(kind)) == []


@pytest.mark.parametrize("kind", choices_by_group()["optimizer"])
def test_check_without_packages_says_what_to_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _name: None)
    problems = check(section(kind))
    assert len(problems) == (kind in PACKAGES)
    for problem in problems:
        assert f"optimizer={kind}" in problem
        assert PACKAGES[kind] in problem


@pytest.mark.parametrize("kind", KINDS)
def test_notes_on_paged_kinds_on_cpu(kind: str) -> None:
    assert len(notes(section(kind), "cpu")) == (kind in PAGED_KINDS)
    assert notes(section(kind), "cuda") == []
