"""What the model answered first and what it answers now, prompt by prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.page.figures import number
from app.page.html import Child, Html, element, joined

_MOST = 24
_LONGEST = 1500
_Key = tuple[str, str, int]


def answers(lines: Sequence[Mapping[str, Any]]) -> Child:
    """The first step that has answers beside the last one; None without any."""
    by_step: dict[int, dict[_Key, Answer]] = {}
    for line in lines:
        found = by_step.setdefault(line["step"], {})
        prompt, expected = str(line.get("prompt", "")), str(line.get("expected", ""))
        again = sum(key[:2] == (prompt, expected) for key in found)
        found[prompt, expected, again] = Answer.of(line)
    if not by_step:
        return None
    steps = sorted({min(by_step), max(by_step)})
    told = [_told(step, by_step[step]) for step in steps]
    prompts = list(by_step[steps[-1]])
    left_out = len(prompts) - _MOST
    return joined(
        element("p", f"As expected: {', '.join(told)}.", class_="soft"),
        [_sample(key, steps, by_step) for key in prompts[:_MOST]],
        element("p", f"{left_out} more in samples.jsonl.", class_="remark") if left_out > 0 else None,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, and of a label how likely it was to it."""

    text: str
    likelihood: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Answer":
        """Of a line of samples.jsonl."""
        return cls(str(line.get("answer", "")), number(line.get("likelihood")))

    @property
    def shown(self) -> str:
        """For people."""
        return self.text if self.likelihood is None else f"{self.text} ({self.likelihood:.0%})"


def shortened(text: str) -> str:
    """Long texts by their beginning, with what is left out."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} more characters)"


def is_right(answer: Answer, expected: str) -> bool:
    """Whether they are the same but for space around them."""
    return answer.text.strip() == expected.strip()


def moment(step: int) -> str:
    """The step, or that it was before any."""
    return "before training" if step == 0 else f"after step {step:,}"


def _told(step: int, found: Mapping[_Key, Answer]) -> str:
    right = sum(is_right(answer, key[1]) for key, answer in found.items())
    return f"{right} of {len(found)} {moment(step)}"


def box(label: str, text: str, right: bool | None) -> Html:
    """One answer; `right` where it can be."""
    tick = element("span", " ✓", class_="tick") if right else None
    shown = shortened(text.strip()) or element("span", "(nothing)", class_="soft")
    kind = None if right is None else "right" if right else "wrong"
    return element(
        "div",
        element("span", label, tick, class_="label"),
        element("div", shown, class_="text"),
        class_=kind,
    )


def asked(prompt: str, boxes: Sequence[Html]) -> Html:
    """A prompt, and below it what was expected and answered."""
    return element(
        "div",
        element("span", "prompt", class_="label"),
        element("div", shortened(prompt.strip()), class_="text"),
        element("div", boxes, class_="answers"),
        class_="sample",
    )


def _sample(key: _Key, steps: Sequence[int], by_step: Mapping[int, Mapping[_Key, Answer]]) -> Html:
    prompt, expected, _ = key
    boxes = [box("expected", expected, None)]
    for step in steps:
        if key in by_step[step]:
            answer = by_step[step][key]
            boxes.append(box(moment(step), answer.shown, is_right(answer, expected)))
    return asked(prompt, boxes)
