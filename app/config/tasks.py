"""Properties of tasks that need no torch; `app/tasks` has their code."""

from dataclasses import dataclass, replace
from typing import Literal

from app.config.kinds import CHAT_FORMATS, LABELED_FORMATS, PREFERENCE_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.config.schema import TaskConfig


@dataclass(frozen=True, slots=True)
class Task:
    """Properties of a training task: model head, row formats and messages."""

    name: str
    description: str  # models for the task
    examples: str  # model types
    auto_class: str  # in transformers
    mapping: str  # transformers' table of classes by config
    pipeline: str  # pipeline tag of the hub
    peft_type: str | None  # in adapter_config.json
    sees: Literal["before", "both", "either"]  # which tokens a token attends to
    unit: Literal["token", "word", "class"]  # unit of a prediction; class: one per document
    writes_text: bool  # the model generates text
    formats: tuple[str, ...]  # supported row formats
    other_rows: str  # error message for other formats
    documents: int = 1  # documents per row
    one_label: str = ""  # error message if all rows have the same label
    labeling: str = "single"  # label type of the rows without `task.problem`
    tokenizer: str = "asset:tiny"  # included tokenizer for random weights
    labels: tuple[str, ...] = ()  # class names of the run
    problem: str | None = None  # classification problem of the run

    @property
    def pooled(self) -> bool:
        """Whether there is one answer per document, from one of its states."""
        return self.unit == "class"

    @property
    def has_classes(self) -> bool:
        """Whether the head is one for the labels of the run, and trained whole with any adapter."""
        return self.unit != "token"


_ALL = (
    Task(
        name="causal",
        description="a causal language model",
        examples="llama, qwen3, mistral, gemma3_text, phi3, olmo2, gpt_oss and most kinds whose layers are "
        "full, sliding or linear attention, Mamba or convolutions",
        auto_class="AutoModelForCausalLM",
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING",
        pipeline="text-generation",
        peft_type="CAUSAL_LM",
        sees="before",
        unit="token",
        writes_text=True,
        formats=(
            *(name for name in CHAT_FORMATS if name not in PREFERENCE_FORMATS),
            "prompt_completion",
            "text",
            "token_ids",
        ),
        other_rows="task=causal cannot train on labels. "
        "Set task=classification, or dataset=text to train on the text without labels.",
    ),
    Task(
        name="masked",
        description="an encoder with a head for hidden tokens",
        examples="bert, roberta, modernbert, distilbert, electra",
        auto_class="AutoModelForMaskedLM",
        mapping="MODEL_FOR_MASKED_LM_MAPPING",
        pipeline="fill-mask",
        peft_type=None,  # PEFT has no type for it
        sees="both",
        unit="token",
        writes_text=False,
        formats=("text",),
        other_rows="task=masked needs plain text. Set dataset=text dataset.path=FILE, or task=causal.",
        tokenizer="asset:wordpiece",  # has a mask token
    ),
    Task(
        name="classification",
        description="a model with a head for classes",
        examples="bert, roberta, modernbert, distilbert, electra, llama, qwen3, mistral",
        auto_class="AutoModelForSequenceClassification",
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        pipeline="text-classification",
        peft_type="SEQ_CLS",
        sees="either",
        unit="class",
        writes_text=False,
        formats=LABELED_FORMATS,
        other_rows="task=classification needs labels, which such rows lack. Set dataset=labelled_text or "
        "dataset=text_pair with dataset.path=FILE, or task=causal.",
        one_label="there is only one class. Use rows with at least two labels, or list all labels: "
        "task.labels=[one,other].",
    ),
    Task(
        name="tokens",
        description="a model with a head for tags of words",
        examples="bert, roberta, modernbert, distilbert, electra, llama, qwen3, mistral",
        auto_class="AutoModelForTokenClassification",
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        pipeline="token-classification",
        peft_type="TOKEN_CLS",
        sees="either",
        unit="word",
        writes_text=False,
        formats=TAGGED_FORMATS,
        other_rows="task=tokens needs a tag for each word, which such rows lack. Set dataset=tagged_words with "
        "dataset.path=FILE, or task=causal.",
        labeling="tokens",
        tokenizer="asset:wordpiece",
        one_label="there is only one class. Use rows with at least two tags, or list all tags: task.labels=[O,B-PER].",
    ),
)
_PREFERENCE = replace(
    _ALL[0],
    name="preference",
    documents=2,
    formats=tuple(name for name in PREFERENCE_FORMATS if ROW_FORMATS[name].pairs),
    other_rows="task=preference needs chosen/rejected pairs. Set dataset=preference with "
    "dataset.path=FILE, or task=causal.",
)
_PREFERENCE_LABEL = replace(
    _ALL[0],
    name="preference_label",
    formats=tuple(name for name in PREFERENCE_FORMATS if not ROW_FORMATS[name].pairs),
    other_rows="recipe=kto needs single answers labeled good/bad. Set dataset=preference_label with "
    "dataset.path=FILE, or recipe=dpo for pairs of answers.",
    one_label="all answers have the same label. Use rows with both labels, true and false, or fine-tune on good "
    "answers only with recipe=lora.",
)
TASKS: dict[str, Task] = {task.name: task for task in (*_ALL, _PREFERENCE, _PREFERENCE_LABEL)}


def task_of(config: TaskConfig) -> Task:
    """Return the task of a run with its labels."""
    task = TASKS[config.kind]
    return replace(task, labels=tuple(config.labels), problem=config.problem if task.pooled else None)


def labeling_of(config: TaskConfig) -> str:
    """Return the label type of a run's rows."""
    task = TASKS[config.kind]
    return config.problem if task.pooled else task.labeling
