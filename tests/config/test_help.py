"""`--help` names what can be chosen, and nothing else."""

import re

from app.config.groups import choices_by_group
from app.config.help import asks_for_help, help_text
from app.config.load import compose_run


def test_every_choice_is_named_and_no_part_of_one() -> None:
    text = help_text()
    for group, names in choices_by_group().items():
        assert re.search(rf"^  {group}\b", text, re.MULTILINE), group
        for name in names:
            assert re.search(rf"[ ]{re.escape(name)}\*?(\s|$)", text), (group, name)
    assert "_hub" not in text
    assert "_policy" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_stars_are_what_a_run_without_settings_takes() -> None:
    starred = re.findall(r"(\w+)\*", help_text())
    run = compose_run([])
    for kind in (run.optimizer.kind, run.schedule.kind, run.adapter.kind, run.precision.kind, run.task.kind):
        assert kind in starred
    assert {"lora", "tiny", "sample"} <= set(starred)
    assert "adapter       lora* none" in help_text()


def test_it_is_asked_for_in_two_ways() -> None:
    assert asks_for_help(["recipe=lora", "--help"])
    assert asks_for_help(["-h"])
    assert not asks_for_help(["recipe=lora", "--cfg", "job"])
