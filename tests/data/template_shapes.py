"""The shapes that chat templates come in: a file each in templates/, written for these tests.

`python -m tests.data.template_shapes` writes golden/ anew: read what changed before you believe it.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from app.config.schema import Columns
from app.data.formats import read_row
from app.data.loss_mask import RenderedRow, Renderer
from app.data.rows import Conversation, RowProblem
from app.data.tokenizer import Encoder, Tokens
from tests.data.small import chat, config, trained_backend

HERE = Path(__file__).parent
MARKS = (
    *("<s>", "</s>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|end|>", "<|endoftext|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|end_call|>"),
    *("<|output|>", "<|end_output|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template does. `end` closes every answer, `last_end` the last one; `lead` opens them."""

    end: str
    bos: str = ""
    eos: str = "</s>"
    last_end: str = ""
    lead: str = ""
    system: bool = True
    tools: bool = False


SHAPES = {
    "calls_without_content": Shape("</s>", bos="<|begin|>", tools=True),
    "channels": Shape("<|end|>", last_end="<|return|>", lead="<|channel|>final<|message|>", eos="<|return|>"),
    "chatml": Shape("<|im_end|>", eos="<|im_end|>"),
    "closed_at_the_end": Shape("<|end|>", last_end="<|end|>\n<|endoftext|>", eos="<|endoftext|>"),
    "empty_thoughts": Shape("<|im_end|>", eos="<|im_end|>", tools=True),
    "generation_marked": Shape("<|end|>", eos="<|end|>"),
    "headers_with_tools": Shape("<|eot_id|>", bos="<|begin|>", eos="<|eot_id|>", tools=True),
    "inst_system_in_first": Shape("</s>", bos="<s>", lead=" "),
    "inst_system_in_last": Shape("</s>", bos="<s>", lead=" "),
    "inst_without_system": Shape("</s>", bos="<s>", system=False),
    "model_turns": Shape("<end_of_turn>", bos="<s>", eos="<end_of_turn>", system=False),
    "plain_words": Shape("</s>", bos="<s>", lead=" "),
    "tags_for_tools": Shape("<|im_end|>", eos="<|im_end|>", tools=True),
    "thoughts_dropped": Shape("</s>", bos="<|begin|>"),
    "thoughts_of_last": Shape("</s>", bos="<|begin|>"),
}

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, "é"]}'}}
CASES: dict[str, dict[str, Any]] = {
    "talk": {"messages": chat("Hi", "Hello.", "And you?", "Fine.")},
    "system": {"messages": chat("Hi", "Hello.", "And you?", "Fine.", system="Be brief.")},
    "first answer untrained": {
        "messages": [*chat("Hi"), {**chat("", "Hello.")[1], "train": False}, *chat("And you?", "Fine.")]
    },
    "thoughts": {
        "messages": chat(
            "Hi", "<think>\nSay hello.\n</think>\n\nHello.", "And you?", "<think>\nWell.\n</think>\n\nFine."
        )
    },
    "tools": {
        "tools": [ADD],
        "messages": [
            *chat("1 + 2?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
    },
}


@cache
def shaped(name: str) -> Any:
    """A tokenizer with a template of this shape."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(trained_backend(400, ("<pad>", *MARKS))),
        bos_token=SHAPES[name].bos or None,
        eos_token=SHAPES[name].eos,
        pad_token="<pad>",
    )
    made.chat_template = (HERE / "templates" / f"{name}.jinja").read_text()
    return made


@cache
def _columns() -> Columns:
    return config("x").columns


def conversation(row: dict[str, Any]) -> Conversation:
    made = read_row(row, "messages", _columns())
    assert isinstance(made, Conversation)
    return made


def render_row(name: str, row: dict[str, Any], train_on: str = "assistant", thinking: str = "train") -> RenderedRow:
    return Renderer(shaped(name), train_on, "expand", thinking).render(conversation(row))


def segments(tokenizer: Any, sample: Tokens) -> list[list[Any]]:
    """The text of a sample in stretches that are trained as a whole, or not."""
    runs: list[tuple[list[int], bool]] = []
    for token, trained in zip(sample.ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token)
    return [[tokenizer.decode(ids), trained] for ids, trained in runs]


def labels(name: str, row: dict[str, Any]) -> list[Any] | str:
    """As golden/ has them: the segments of each sample, or why there is none."""
    try:
        made = render_row(name, row)
    except RowProblem as problem:
        return f"refused: {problem}"
    return [segments(shaped(name), sample) for sample in Encoder(shaped(name)).encode(made.samples)]


def golden(name: str) -> Path:
    return HERE / "golden" / f"{name}.json"


def _written(found: dict[str, list[Any] | str]) -> str:
    """A segment a line."""
    cases = []
    for case, samples in found.items():
        if isinstance(samples, str):
            cases.append(f"  {json.dumps(case)}: {json.dumps(samples, ensure_ascii=False)}")
            continue
        shown = [
            "    [\n" + ",\n".join(f"      {json.dumps(part, ensure_ascii=False)}" for part in sample) + "\n    ]"
            for sample in samples
        ]
        cases.append(f"  {json.dumps(case)}: [\n" + ",\n".join(shown) + "\n  ]")
    return "{\n" + ",\n".join(cases) + "\n}\n"


if __name__ == "__main__":
    for shape in SHAPES:
        golden(shape).write_text(_written({case: labels(shape, row) for case, row in CASES.items()}), encoding="utf-8")
