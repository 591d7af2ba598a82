"""Answers to held-out prompts: at the first and the last evaluation of a run, or of several runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.pages.read_run import SavedRun
from app.tracking.formatting import Sample

_MAX_PROMPTS = 24
_Prompt = tuple[str, str]  # prompt and expected answer


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; `right` is None if it is not judged."""

    label: str
    text: str
    right: bool | None = None


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """Prompts, each with the expected and the given answers; `more` prompts are left out."""

    prompts: Sequence[tuple[str, Sequence[Answer]]]
    summary: str
    more: int


def answers_before_and_after(lines: Sequence[Mapping[str, Any]]) -> AnswerTable | None:
    """Answers of the first and the last step in samples.jsonl; None without any."""
    steps = sorted({line["step"] for line in lines})
    answered = {_moment(step): _answers_at(lines, step) for step in (*steps[:1], *steps[-1:])}
    if not answered:
        return None
    counts = (f"{sum(map(_is_right, given.values()))} of {len(given)} {moment}" for moment, given in answered.items())
    return _shown(answered, list(list(answered.values())[-1]), f"As expected: {', '.join(counts)}.")


def last_answers(runs: Sequence[tuple[str, SavedRun]]) -> AnswerTable | None:
    """Last answers of several runs to prompts that at least two of them share; None without any."""
    answered = {}
    for name, run in runs:
        if run.samples:
            step = max(line["step"] for line in run.samples)
            answered[f"{name}, {_moment(step)}"] = _answers_at(run.samples, step)
    prompts = dict.fromkeys(prompt for given in answered.values() for prompt in given)
    shared = [prompt for prompt in prompts if sum(prompt in given for given in answered.values()) > 1]
    return _shown(answered, shared) if shared else None


def _answers_at(lines: Sequence[Mapping[str, Any]], step: int) -> dict[_Prompt, Sample]:
    names = Sample.__dataclass_fields__
    samples = [Sample(**{key: line[key] for key in names if key in line}) for line in lines if line["step"] == step]
    return {(each.prompt, each.expected): each for each in samples}


def _shown(
    answered: Mapping[str, Mapping[_Prompt, Sample]], prompts: Sequence[_Prompt], summary: str = ""
) -> AnswerTable:
    shown = []
    for prompt in prompts[:_MAX_PROMPTS]:
        given = [
            Answer(label, samples[prompt].answer_text, _is_right(samples[prompt]))
            for label, samples in answered.items()
            if prompt in samples
        ]
        shown.append((prompt[0], [Answer("expected", prompt[1]), *given]))
    return AnswerTable(shown, summary, len(prompts) - len(shown))


def _is_right(sample: Sample) -> bool:
    return sample.answer.strip() == sample.expected.strip()


def _moment(step: int) -> str:
    return "before training" if step == 0 else f"after step {step:,}"
