"""Every preset of conf/sweep, planned with all its trials."""

import pytest

from app.config.groups import choices_by_group
from app.sweeps.ladder import LADDER
from app.sweeps.preset import read_preset
from app.sweeps.sweep import plan_sweep
from tests.sweeps.test_sweep import nothing_more

NAMES = [n for n in choices_by_group()["sweep"] if read_preset([f"sweep={n}"]).config.proposer != LADDER]


@pytest.mark.parametrize("name", NAMES)
def test_presets_make_valid_trials(name: str) -> None:
    plan = plan_sweep(["-m", f"sweep={name}"], nothing_more)
    assert len(plan.runs) == len(plan.proposer.points)
    assert 5 <= plan.proposer.count <= 12
    assert plan.notes
