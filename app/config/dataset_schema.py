"""Typed schema of the section `dataset`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from app.config.fields import SECTIONS, choice, number
from app.config.row_formats import ROW_FORMATS


@dataclass(kw_only=True, slots=True)
class Columns:
    """Names of the columns; only those of the chosen format are read, and none for null."""

    messages: str = MISSING  # list of messages with role and content
    conversations: str = MISSING  # list of turns of ShareGPT
    tools: str | None = MISSING  # list of tool definitions; null: not read
    system: str | None = MISSING  # system message of a conversation; null: not read
    reasoning: str | None = None  # thought before the last answer; also thinking, rationale, cot; null: not read
    chat_template_kwargs: str | None = None  # object with options of the chat template for the row; null: not read
    instruction: str = MISSING  # instruction
    input: str | None = MISSING  # further input of an instruction; null: not read
    output: str = MISSING  # answer to an instruction
    history: str | None = MISSING  # earlier turns of an instruction; null: not read
    question: str = MISSING  # question
    answer: str = MISSING  # answer to a question
    prompt: str = MISSING  # prompt of a completion, as text or messages
    completion: str = MISSING  # completion, as text or messages
    text: str = MISSING  # plain or labelled text
    sentence1: str = MISSING  # first text of a pair
    sentence2: str = MISSING  # second text of a pair
    # label of a text or a pair, a word or a whole number; of an answer, true where it is wanted
    label: str = MISSING
    tokens: str = "tokens"  # list of words
    tags: str = "tags"  # list of a tag for each word: names like B-PER, or whole numbers
    chosen: str = "chosen"  # wanted answer, as text or messages
    rejected: str = "rejected"  # unwanted answer, as text or messages


@dataclass(kw_only=True, slots=True)
class MixSource:
    """One source of a mix."""

    path: str = MISSING  # file, folder, glob, hub id or asset:NAME
    weight: float = number(1.0, at_least=0, at_most=1000)  # how often an epoch has each row of the source
    max_rows: int | None = number(None, at_least=1)  # first rows to take; null: that of the dataset
    format: str | None = None  # format of the rows; null: that of the dataset
    columns: dict[str, Any] = field(default_factory=dict)  # names of columns that differ from dataset.columns
    split: str | None = None  # split of a hub dataset; null: that of the dataset
    hub_config: str | None = None  # configuration of a hub dataset
    revision: str | None = None  # branch, tag or commit of a hub dataset


@dataclass(kw_only=True, slots=True)
class RandomRowsConfig:
    """Rows made from a seed, for `dataset.path=random:`."""

    rows: int = number(512, at_least=1)  # rows that dataset=random makes
    length: int = number(512, at_least=2)  # words of a row, and so its tokens with dataset.max_length of the same size
    shortest: int | None = number(None, at_least=2)  # lengths are drawn between it and random.length; null: all alike
    classes: int = number(2, at_least=2)  # labels; the first word of a row is its label
    seed: int = number(0, at_least=0)  # another seed makes other words and rows


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """Where the rows are, their format, and which tokens are trained."""

    path: str | None = MISSING  # file, folder, glob, hub id or asset:NAME with the rows, or random:
    # sections by the user's names; untyped because Hydra refuses to add keys to a typed mapping
    # several sources by name, in place of dataset.path
    mix: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: MixSource})
    random: RandomRowsConfig = field(default_factory=RandomRowsConfig)
    format: str = choice("auto", *ROW_FORMATS)  # format of the rows
    split: str = MISSING  # split of a dataset of the hub, or of a folder as the hub has them
    hub_config: str | None = None  # configuration of a dataset of the hub, or of such a folder
    revision: str | None = None  # branch, tag or commit of a hub dataset
    columns: Columns = field(default_factory=Columns)
    leave_out: list[str] = field(default_factory=list)  # columns not read on purpose: rejected answers, paths of images
    max_length: int = number(at_least=2)  # largest number of tokens of a sample
    # trained tokens; auto: assistant turns, the completion, or all of a plain text
    train_on: str = choice("auto", "assistant", "last", "completion", "all")
    # what an assistant thought before its answer; mask: read, but not trained; drop: taken out of the rows
    thinking: str = choice("train", "mask", "drop", default="train")
    # what happens to longer samples; auto splits text, cuts labelled text, drops others
    on_overflow: str = choice("auto", "error", "truncate", "drop", "split")
    on_bad_row: str = choice("error", "skip")  # error stops at an unreadable row; skip counts and lists them
    # chat templates that rewrite earlier turns; expand: one sample per trained turn; join: one sample with all of them
    on_unstable_template: str = choice("expand", "join", "last", "error")
    max_rows: int | None = number(at_least=1)  # first rows to take, of a mix from each source
    deduplicate: bool = False  # train on the first of equal samples only
    eval_path: str | None = None  # file with held-out rows
    eval_split: str | None = None  # split with held-out rows
    eval_fraction: float = number(at_least=0, below=1)  # fraction of rows to hold out, chosen by their content
    eval_max_rows: int | None = number(at_least=1)  # first held-out rows to take
    workers: int | None = number(at_least=1)  # no longer has a meaning; leave it out
