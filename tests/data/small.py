"""A tokenizer trained on a few lines, five kinds of chat template, and the section `dataset`."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from app.config.conf_files import CONF
from app.config.schema import DatasetConfig
from app.data.token_dataset import TokenRows

MARKS = (
    *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
)
LINES = [
    "What is the capital of France? The capital of France is Paris.",
    "Write one line about rain.\nRain falls on the roof, and the cat sleeps.",
    "user assistant system model tool Be brief. Thank you, you are welcome!",
    "two and two make four; three times five is fifteen",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
THINKING = (  # keeps what was thought only in the last turn
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] | trim }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "thinking": THINKING}
_BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>"}
_EOS = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}


@cache
def trained_backend(size: int, special: tuple[str, ...]) -> str:
    """A byte-level BPE tokenizer trained on a few lines, as JSON."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 20, trainer)
    return backend.to_str()


def tokenizer(kind: str | None = "chatml", *, adds_bos: bool = False, size: int = 400) -> Any:
    """A byte-level BPE tokenizer with the chat template of `kind`, and the special tokens that go with it."""
    backend = Backend.from_str(trained_backend(size, MARKS))
    bos, eos = _BOS.get(kind or "", "<s>"), _EOS.get(kind or "", "</s>")
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<pad>")
    made.chat_template = TEMPLATES[kind] if kind else None
    return made


def config(path: Path | str, fmt: str = "messages", **changes: Any) -> DatasetConfig:
    """The section `dataset` as conf/ has it, with changes; `columns` as a dict."""
    policy = OmegaConf.load(CONF / "dataset" / "_policy.yaml")
    values = {"path": str(path), "format": fmt, "max_length": 200, **changes}
    merged = OmegaConf.merge(OmegaConf.structured(DatasetConfig), policy, values)
    return cast(DatasetConfig, OmegaConf.to_object(merged))


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    said = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_chats(path: Path, *chats: list[dict[str, str]]) -> Path:
    return write_jsonl(path, [{"messages": messages} for messages in chats])


def greetings(count: int, start: int = 0) -> list[list[dict[str, str]]]:
    """Short conversations that differ."""
    return [chat("Hi", f"Hello {n}") for n in range(start, start + count)]


def locations(rows: TokenRows | None) -> list[str]:
    return [] if rows is None else [rows.source_location(i) for i in range(len(rows))]


def trained_texts(tokenizer: Any, ids: Any, trained: Any) -> list[str]:
    """Each run of trained tokens as text."""
    runs: list[list[int]] = []
    for at, (token, wanted) in enumerate(zip(ids, trained, strict=True)):
        if wanted and (at == 0 or not trained[at - 1]):
            runs.append([])
        if wanted:
            runs[-1].append(int(token))
    return [tokenizer.decode(run) for run in runs]
