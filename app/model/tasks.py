"""What a model can be built to do: the class of transformers, and what that class must be like."""

from dataclasses import dataclass, replace
from typing import Any

from app.config.schema import TaskConfig


@dataclass(frozen=True, slots=True)
class Task:
    """One head on a backbone."""

    words: str  # of a model that can do it
    auto_class: str  # of transformers
    kinds: str  # transformers' table of the classes that have it, by configuration
    bidirectional: bool | None  # whether tokens see those after them; None: either will do
    peft_type: str | None  # what PEFT writes down
    examples: str
    pooled: bool = False  # one answer for a document, from one of its states
    labels: tuple[str, ...] = ()  # what the answers are, where the run decides that

    @property
    def model_class(self) -> Any:
        """What loads or makes the model."""
        import transformers

        return getattr(transformers, self.auto_class)

    def does(self, kind: str) -> bool:
        """Whether transformers has such a class for a kind at all."""
        from transformers.models.auto import modeling_auto

        return kind in getattr(modeling_auto, f"{self.kinds}_NAMES")

    def is_bidirectional(self, lm: Any) -> bool:
        """Whether tokens of this model see those after them."""
        if self.bidirectional is not None:
            return self.bidirectional
        return not any(getattr(module, "is_causal", False) for module in lm.modules())

    def configured(self, numbers: Any) -> Any:
        """A configuration of transformers with the answers of the run in it."""
        if self.labels:
            numbers.id2label = dict(enumerate(self.labels))
            numbers.label2id = {label: at for at, label in enumerate(self.labels)}
            numbers.problem_type = "single_label_classification"
        if self.pooled and hasattr(numbers, "classifier_pooling"):
            numbers.classifier_pooling = (
                "cls"  # the classifier is new: nothing has learnt the mean of all tokens
            )
        return numbers

    def class_of(self, numbers: Any) -> Any | None:
        """The model class for a configuration of transformers, None where its kind has none."""
        import transformers

        return getattr(transformers, self.kinds).get(type(numbers), None)


TASKS: dict[str, Task] = {
    "causal": Task(
        words="a causal language model",
        auto_class="AutoModelForCausalLM",
        kinds="MODEL_FOR_CAUSAL_LM_MAPPING",
        bidirectional=False,
        peft_type="CAUSAL_LM",
        examples="llama, qwen3, mistral, gemma3_text, phi3, olmo2, gpt_oss and most kinds whose layers are "
        "full or sliding attention",
    ),
    "masked": Task(
        words="an encoder with a head for hidden tokens",
        auto_class="AutoModelForMaskedLM",
        kinds="MODEL_FOR_MASKED_LM_MAPPING",
        bidirectional=True,
        peft_type=None,  # PEFT has no name for it
        examples="bert, roberta, modernbert, distilbert, electra",
    ),
    "classification": Task(
        words="a model with a head for classes",
        auto_class="AutoModelForSequenceClassification",
        kinds="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        bidirectional=None,
        peft_type="SEQ_CLS",
        examples="bert, roberta, modernbert, distilbert, electra, llama, qwen3, mistral",
        pooled=True,
    ),
}


def task_of(config: TaskConfig) -> Task:
    """Of a run, with its labels."""
    return replace(TASKS[config.kind], labels=tuple(config.labels))
