"""Each accepted kind of transformers once, as a tiny model: none is worse than the table says."""

import pytest

from app.config.kinds import TIERS, model_kinds
from scripts import make_kinds

_PARTS = 4  # of each section, which run beside each other
# too slow here for what they show; the script tries them
_SLOW: frozenset[tuple[str, str]] = frozenset()


def test_the_table_has_every_kind() -> None:
    known = {section: sorted(kinds) for section, kinds in model_kinds().tasks.items()}
    assert known == {section: sorted(make_kinds.kinds_of(section)) for section in make_kinds.SECTIONS}


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("section", make_kinds.SECTIONS)
def test_every_kind_reaches_its_tier(section: str, part: int) -> None:
    accepted = {kind: tier for kind, tier in model_kinds().tasks[section].items() if tier.accepted}
    worse = {}
    with make_kinds.quiet():
        for kind in list(accepted)[part::_PARTS]:
            if (section, kind) in _SLOW:
                continue
            found = make_kinds.tier_in(section, kind)
            if TIERS.index(found.name) > TIERS.index(accepted[kind].name):
                worse[kind] = f"{accepted[kind].name} -> {found.name}: {found.reason}"
            elif found.uncalled != accepted[kind].uncalled:
                worse[kind] = f"uncalled layers: {accepted[kind].uncalled} -> {found.uncalled}"
    assert worse == {}
