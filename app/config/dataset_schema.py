"""The typed shape of a dataset; as in `config.schema`, values live in conf/."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from app.config.fields import SECTIONS, choice, number


@dataclass(kw_only=True, slots=True)
class Columns:
    """Which column of the data has what; only those of the chosen format are read. Null: nobody reads it."""

    messages: str = MISSING
    conversations: str = MISSING
    tools: str | None = MISSING
    system: str | None = MISSING
    instruction: str = MISSING
    input: str | None = MISSING
    output: str = MISSING
    history: str | None = MISSING
    question: str = MISSING
    answer: str = MISSING
    prompt: str = MISSING
    completion: str = MISSING
    text: str = MISSING
    sentence1: str = MISSING
    sentence2: str = MISSING
    label: str = MISSING


@dataclass(kw_only=True, slots=True)
class MixSource:
    """One source of a mix. `weight` is how often an epoch has each of its rows; what is null is as for all sources."""

    path: str = MISSING
    weight: float = number(1.0, at_least=0, at_most=1000)
    max_rows: int | None = number(None, at_least=1)
    format: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    split: str | None = None
    hub_config: str | None = None
    revision: str | None = None


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Where the rows are, what shape they have, and what is trained of them. `mix` is in place of `path`, by name."""

    path: str | None = MISSING
    # sections by names of the user's; Hydra, which would refuse to add to a typed mapping, is not told their type
    mix: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: MixSource})
    format: str = choice(
        *("auto", "messages", "sharegpt", "instruction", "question_answer"),
        *("prompt_completion", "chat_completion", "text", "labelled_text", "text_pair"),
    )
    split: str = MISSING
    hub_config: str | None = None
    revision: str | None = None
    columns: Columns = field(default_factory=Columns)
    max_length: int = number(at_least=2)
    train_on: str = choice("auto", "assistant", "last", "completion", "all")
    on_overflow: str = choice("auto", "error", "truncate", "drop", "split")
    on_bad_row: str = choice("error", "skip")
    on_unstable_template: str = choice("expand", "last", "error")
    max_rows: int | None = number(at_least=1)
    deduplicate: bool = False
    eval_path: str | None = None
    eval_split: str | None = None
    eval_fraction: float = number(at_least=0, below=1)
    eval_max_rows: int | None = number(at_least=1)
    workers: int | None = number(at_least=1)
