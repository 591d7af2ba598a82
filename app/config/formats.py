"""What is known of the formats of rows before any row is read."""

from app.config.dataset_schema import DatasetConfig
from app.config.mixes import sources_of

# rendered by a chat template
CHAT_FORMATS = ("messages", "sharegpt", "instruction", "question_answer", "chat_completion")

LABELLED_FORMATS = ("labelled_text", "text_pair")  # a text or two, and the class that they are of

# what `dataset.train_on` can mean for rows of each format
TRAIN_ON = {
    **dict.fromkeys(CHAT_FORMATS, ("auto", "assistant", "last", "all")),
    "chat_completion": ("auto", "completion", "assistant", "last", "all"),
    "prompt_completion": ("auto", "completion", "all"),
    "text": ("auto", "all"),
    **dict.fromkeys(LABELLED_FORMATS, ("auto",)),
    "auto": ("auto", "assistant", "last", "completion", "all"),  # asked again once the rows are known
}


def trains_answers(dataset: DatasetConfig) -> bool:
    """Whether what is trained of a row answers what stands before it; else it is the whole row."""
    formats = {source.format for source in sources_of(dataset).values()}
    return not formats <= {"text", *LABELLED_FORMATS} and dataset.train_on != "all"


def formats_for(task: str) -> tuple[str, ...]:
    """Those whose rows a task can learn from; `dataset.format=auto` looks for no other."""
    of_labels = task == "classification"
    return tuple(fmt for fmt in TRAIN_ON if fmt != "auto" and (fmt in LABELLED_FORMATS) is of_labels)


def has_chats(dataset: DatasetConfig) -> bool:
    """Whether a chat template writes any of the rows, held-out ones of a file of their own among them."""
    formats = {source.format for source in sources_of(dataset).values()}
    own = {dataset.format} if dataset.eval_path is not None else set()
    return not formats.isdisjoint(CHAT_FORMATS) or not own.isdisjoint(CHAT_FORMATS)
