"""Inference with a finished run: loading with transformers and PEFT, text generation and classification."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.adapters.adapters import quiet_peft, read_adapter_config
from app.base.base_model import drawing_by, names_in, numbers_in_folder, open_folder, quiet_transformers, read_weights
from app.base.base_weights import LoadOptions
from app.base.source import (
    REMOTE_CODE,
    fetch_folder,
    ignored_index,
    library_errors,
    require_intact_base,
    require_weights,
    whole_numbers,
)
from app.base.text_part import rename_adapter
from app.base.tokenizer import load_tokenizer, read_tokenizer
from app.base.weight_files import Names, adapter_weights, tensors_of_file
from app.chat_rendering import ConversationRefused, render_chat
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.config.kinds import PROBLEMS
from app.config.schema import ModelConfig, QuantizationConfig
from app.config.tasks import Task, task_of
from app.errors import CheckpointError, ConfigError, PromptTooLong, gist
from app.layers.attention import own_attention
from app.layers.experts import shown_to_peft, stack_layers, take_over
from app.layers.head import takes_segments
from app.layers.layer_norm import set_norms
from app.layers.quantization import quantization_after_training, quantizer_of
from app.model.build import DTYPES, ModelSections, build_base
from app.model.decoding import end_ids, new_ids
from app.model.losses import Loss
from app.model.training_model import TrainingModel
from app.tasks.classification import CLASS_PROBLEMS


def load_tuned(
    run: Path,
    model: ModelConfig,
    task: Task,
    *,
    adapter: bool,
    quantization: QuantizationConfig | None = None,
    seed: int = 0,
) -> Any:
    """Return the fine-tuned model of a run folder, without its adapter if `adapter=False`. `seed` is that of the run.

    The base is quantized as in training if the adapter was trained to compensate for these rounding errors.
    """
    final = run / "final"
    has_adapter = _is_adapter(final)
    if not has_adapter and not adapter:
        raise CheckpointError(f"adapter=false: {final} is a whole model without its base. Leave adapter out.")
    folder = _base_folder(run, final, model) if has_adapter else final
    if has_adapter:
        require_intact_base(folder)
    require_weights(folder, model.path if has_adapter else str(final))
    dtype = getattr(numbers_in_folder(model, task, folder), "dtype", None) or torch.float32
    quantizer = None if quantization is None else quantizer_of(quantization_after_training(quantization), dtype)
    with drawing_by(seed):
        lm = open_folder(model, task, folder, LoadOptions(dtype, _device(), "eager"), quantizer).whole()
    lm = _for_answers(lm)
    if not has_adapter or not adapter:
        return lm
    return _with_adapter(lm, final, names_in(model, task, folder, lm)).get_base_model()


def weights_of(run: Path, model: ModelConfig, *, tuned: bool) -> ModelConfig:
    """Return the section `model` with the path of the weights of a finished run, or of its base.

    The base of a fully trained model with random initialization is drawn again.
    """
    final = run / "final"
    if _is_adapter(final):
        return replace(model, path=str(_base_folder(run, final, model)), weights="pretrained")
    if tuned:
        return replace(model, path=str(final), weights="pretrained")
    if model.weights == "random":
        return model
    return replace(model, path=str(fetch_folder(model, model.path, with_weights=True)))


def reads_base(run: Path, *, tuned: bool) -> bool:
    """Return whether base weights are read; with an adapter they always are."""
    return not tuned or _is_adapter(run / "final")


def load_training_model(
    run: Path, sections: ModelSections, loss: Loss, device: torch.device, seed: int, *, tuned: bool
) -> TrainingModel:
    """Load a finished run, or its base, for scoring as in training; `sections.model` comes from `weights_of`."""
    final = run / "final"
    network: Any = build_base(sections, device, seed)
    if _is_adapter(final):
        network.requires_grad_(False)  # as with an adapter in training
        names = names_in(sections.model, task_of(sections.task), Path(sections.model.path), network)
        network = _with_adapter(network, final, names) if tuned else network
    compute = DTYPES[sections.precision].compute
    set_norms(network, sections.model, compute)
    return TrainingModel(
        network.to(device), compute, task_of(sections.task), loss, sections.attention, sections.quantizer
    ).eval()


def load_any(model: ModelConfig, task: Task, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Return an unchanged model of a folder or of the Hub, and its tokenizer."""
    folder = fetch_folder(model, model.path, with_weights=True)
    # the adapter of a classifier has a config.json too, with the names of the classes
    if _is_adapter(folder) and all(file.name == ADAPTER_WEIGHTS for file in folder.glob("*.safetensors")):
        raise CheckpointError(
            f"model={model.path}: this is a PEFT adapter without its base. Use run=DIR with the run that trained it, "
            "or export it: finetune export run=DIR kind=merged to=DIR2."
        )
    require_weights(folder, model.path)
    require_intact_base(folder)
    for remark in ignored_index(folder):
        say(remark)
    numbers = whole_numbers(model, folder)  # before AutoTokenizer, which reads config.json too
    numbers._attn_implementation = None  # config.json may name a Hub kernel, which transformers would download
    tokenizer = load_tokenizer(model, needs_template=False)
    options = {"config": numbers, "dtype": "auto", "device_map": {"": _device()}}
    return _for_answers(read_weights(model, task, folder, **options)), tokenizer


def load_tuned_tokenizer(final: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer saved with the weights, including the chat template."""
    with library_errors(f"no tokenizer can be read from {final}", REMOTE_CODE, CheckpointError):
        return read_tokenizer(final, trust_remote_code)


def _is_adapter(final: Path) -> bool:
    return (final / ADAPTER).is_file()


def _base_folder(run: Path, final: Path, model: ModelConfig) -> Path:
    """Return the base folder next to the adapter if the base was random (even in a moved run), else model.path's."""
    if (run / "base").is_dir():
        return run / "base"
    if model.weights == "random":
        named = read_adapter_config(final).get("base_model_name_or_path")
        raise CheckpointError(f"run={run}: its randomly initialized base is missing (it was {named}).")
    return fetch_folder(model, model.path, with_weights=True)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _for_answers(lm: Any) -> Any:
    """Return the model with an attention that supports a key-value cache."""
    quiet_transformers()
    lm.set_attn_implementation(own_attention(lm))
    return lm.eval()


def _with_adapter(lm: Any, final: Path, names: Names) -> Any:
    from safetensors import SafetensorError

    read_adapter_config(final)
    adapter_weights(final)  # refuses a damaged file
    try:
        with quiet_peft(), shown_to_peft(lm), TemporaryDirectory() as renamed:
            from peft import PeftModel

            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
            folder = Path(renamed) if names.is_part else final
            if names.is_part:
                rename_adapter(final, folder, names.of_trained)
            network = PeftModel.from_pretrained(lm, str(folder)).eval()
            _require_loaded(network, folder)
            if stack_layers(lm):  # PEFT's own forward cannot add to packed stacks
                take_over(network)
            return network
    except (OSError, ValueError, RuntimeError, SafetensorError) as fault:
        raise CheckpointError(f"the adapter in {final} cannot be loaded ({gist(fault)}).") from fault


def _require_loaded(network: Any, folder: Path) -> None:
    """Refuse an adapter with missing tensors, which PEFT initializes, or with others."""
    from peft import get_peft_model_state_dict

    names = get_peft_model_state_dict(network, save_embedding_layers=False).keys()
    odd = sorted(names ^ tensors_of_file(folder / ADAPTER_WEIGHTS).keys())
    if odd:
        raise ValueError(f"{ADAPTER_WEIGHTS} and the layers in {ADAPTER} differ in {odd[0]}")


# ---- generate


Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextGenerator:
    """A causal model with its tokenizer and settings; `chat`: render prompts with the chat template."""

    lm: Any
    tokenizer: Any
    chat: bool
    max_new: int
    sampling: dict[str, Any]
    note: Callable[[str], object] = field(default=lambda _text: None)  # for answers cut at the context length

    @property
    def positions(self) -> int | None:
        """Context length of the model, for prompt and answer together; None if not in its config."""
        number = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        return number if isinstance(number, int) else None

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token IDs of a prompt, rendered as in training."""
        try:
            text = (
                render_chat(self.tokenizer, messages, ask=True)
                if self.chat
                else "\n\n".join(message["content"] for message in messages)
            )
        except ConversationRefused as refusal:
            raise ConfigError(f"the chat template rejects this conversation: {refusal}") from refusal
        ids: list[int] = self.tokenizer(text, add_special_tokens=not self.chat).input_ids
        if not ids:
            cause = "the chat template renders nothing. Set chat=false" if self.chat else "it is empty. Enter a text"
            raise ConfigError(f"prompt: {cause}.")
        return ids

    def answers(self, conversations: Sequence[Sequence[Message]], batch: int) -> Iterator[tuple[int, str]]:
        """Yield answers with the indices of their conversations; prompts of similar length share a batch."""
        prompts = [self.ids(messages) for messages in conversations]
        self._require_positions(prompts)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            # an answer cut at the context length would be cut earlier in a batch with a longer prompt
            is_cut = self._max_new(len(prompts[chosen[0]])) < self.max_new
            for group in [[i] for i in chosen] if is_cut else [chosen]:
                answers = self._generated([prompts[i] for i in group])
                yield from zip(group, map(self._text, answers), strict=True)

    def stream(self, messages: Sequence[Message], write: Callable[[str], None]) -> str:
        ids = self.ids(messages)
        self._require_positions([ids])
        pieces = _Streamer(self.tokenizer, write, skip=len(ids))
        new = self._generated([ids], streamer=pieces)[0]
        pieces.end()
        return self._text(new)

    def _generated(self, prompts: Sequence[Sequence[int]], streamer: Any = None) -> list[list[int]]:
        width = max(map(len, prompts))
        max_new, ends = self._max_new(width), end_ids(self.lm, self.tokenizer)
        answers = new_ids(self.lm, prompts, ends, max_new, streamer=streamer, **self.sampling)
        if max_new < self.max_new and any(len(answer) == max_new for answer in answers):
            self.note(
                f"answer cut after {_tokens(max_new)}: the model's context length is {self.positions:,}, and the "
                f"prompt has {width:,}"
            )
        return answers

    def _require_positions(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts without room for an answer, all at once."""
        problems = [
            f"{'prompt' if len(prompts) == 1 else f'prompts: number {number}'}: {_tokens(len(prompt))}, but the "
            f"model's context length is {self.positions:,}, with the answer. Shorten it, or choose a model with more."
            for number, prompt in enumerate(prompts, 1)
            if self._max_new(len(prompt)) < 1
        ]
        if problems:
            raise PromptTooLong(problems)

    def _max_new(self, prompt_tokens: int) -> int:
        return self.max_new if self.positions is None else min(self.max_new, self.positions - prompt_tokens)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


class _Streamer:
    """Streamer interface of transformers; writes text once it can no longer change."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], skip: int) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._skip = skip
        self._ids: list[int] = []
        self._written = 0

    def put(self, tokens: torch.Tensor) -> None:
        """Receive the prompt first, then token by token."""
        new = tokens.flatten().tolist()
        skipped = min(self._skip, len(new))
        self._skip -= skipped
        self._ids += new[skipped:]
        self._flush(final=False)

    def end(self) -> None:
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True).lstrip()
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):  # the first half of a character
            return
        self._write(text[self._written :])
        self._written = max(self._written, len(text))


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classification model with its tokenizer; texts are truncated to `max_length` tokens."""

    lm: Any
    tokenizer: Any
    max_length: int
    problem: str = "single"

    def answers(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[dict[str, float], bool]]:
        """Yield label probabilities, highest first, or numbers, and whether the text or pair was truncated; one at a
        time, so that no padding changes them.
        """
        for parts in texts:
            cut = len(self.tokenizer(*parts, verbose=False).input_ids) > self.max_length
            yield self._values(parts), cut

    @torch.no_grad()
    def _values(self, texts: Sequence[str]) -> dict[str, float]:
        read = self.tokenizer(*texts, truncation=True, max_length=self.max_length, return_tensors="pt")
        names = ["input_ids", *(["token_type_ids"] if len(texts) > 1 and takes_segments(self.lm) else [])]
        inputs = {name: read[name].to(self.lm.device) for name in names if name in read}
        values = CLASS_PROBLEMS[self.problem].values(self.lm(**inputs).logits[0].float()).tolist()
        by_label = {self.lm.config.id2label[at]: value for at, value in enumerate(values)}
        return dict(sorted(by_label.items(), key=lambda item: -item[1])) if PROBLEMS[self.problem].named else by_label
