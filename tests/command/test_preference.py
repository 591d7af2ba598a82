"""Losses over answers from the command line: settings and rows that compare nothing."""

import pytest

from tests.config.small import refusal_of


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe=kto", "task=preference"), "preference=kto does not match task=preference"),
        (("recipe=kto", "preference.sft=1"), "preference=kto ignores it"),
        (("recipe=kto", "dataset=pairs"), "such rows need recipe=dpo or recipe=orpo or recipe=simpo"),
        (("recipe=dpo", "dataset=labelled_answers"), "such rows need recipe=kto"),
        (("recipe=dpo", "task=causal"), "preference=dpo does not match task=causal"),
        (("recipe=orpo", "preference.gamma=1"), "preference=orpo ignores it"),
        (("recipe=dpo", "dataset=sample"), "task=preference needs chosen/rejected pairs"),
        (("dataset=preference", "dataset.path=x"), "such rows need recipe=dpo or recipe=orpo or recipe=simpo"),
    ],
)
def test_settings_that_compare_nothing_are_refused(words: tuple[str, ...], message: str) -> None:
    assert any(message in problem for problem in refusal_of(*words))
