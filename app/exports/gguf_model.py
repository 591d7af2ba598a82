"""Models and tokenizers for llama.cpp: model types, metadata, tensor names, vocabulary and pre-tokenizers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from app.chat_rendering import ConversationRefused, render_chat
from app.errors import CheckpointError, ConfigError

OTHER_WAY = "Set llama_cpp=DIR, a llama.cpp folder: its converter supports more models."
_LARGEST_F16 = 65504.0
# others would change what llama.cpp computes by default
_YARN = {"type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"}


class Kind(NamedTuple):
    """Differences between llama.cpp's and transformers' model of an architecture."""

    architecture: str  # name in gguf.MODEL_ARCH
    pairs: bool = False  # RoPE rotates neighboring rows of q and k, not rows half a head apart
    norm_offset: float = 0.0  # added to the stored weights of norms
    window_every: int = 0  # every n-th layer attends to all tokens, the others have a window


KINDS = {
    "llama": Kind("LLAMA", pairs=True),
    "mistral": Kind("LLAMA", pairs=True),
    "qwen2": Kind("QWEN2"),
    "qwen3": Kind("QWEN3"),
    "gemma3_text": Kind("GEMMA3", norm_offset=1.0, window_every=6),
}


class Place(NamedTuple):
    """Tensor of the file."""

    name: str
    model_name: str  # in the model of transformers
    source: str  # in the merged files
    shape: tuple[int, ...]
    type: Any  # GGMLQuantizationType

    @property
    def stored_shape(self) -> tuple[int, ...]:
        from gguf.quants import quant_shape_to_byte_shape

        return quant_shape_to_byte_shape(self.shape, self.type)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.stored_shape))


@dataclass(frozen=True)
class GgufModel:
    """Model of a supported type, for llama.cpp."""

    kind: Kind
    numbers: Any  # model config
    quant: str

    @property
    def head_dim(self) -> int:
        head_dim: int | None = getattr(self.numbers, "head_dim", None)
        return head_dim or int(self.numbers.hidden_size // self.numbers.num_attention_heads)

    @property
    def rope(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """RoPE parameters of layers with full attention, and of layers with a window."""
        parameters = self.numbers.rope_parameters
        return parameters.get("full_attention", parameters), parameters.get("sliding_attention", parameters)

    @cached_property
    def _names(self) -> Any:
        from gguf import MODEL_ARCH, get_tensor_name_map

        return get_tensor_name_map(MODEL_ARCH[self.kind.architecture], self.numbers.num_hidden_layers)

    def place(self, name: str, source: str, shape: tuple[int, ...]) -> Place:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        gguf_name = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise CheckpointError(f"kind=gguf: the gguf package has no name for {source}. Set kind=merged.")
        packed = GGMLQuantizationType[self.quant.upper()]
        if len(shape) < 2:
            packed = GGMLQuantizationType.F32
        elif shape[-1] % GGML_QUANT_SIZES[packed][0]:
            packed = GGMLQuantizationType.F16
        return Place(gguf_name, name, source, shape, packed)

    def reordered(self, place: Place, weight: Tensor) -> Tensor:
        """Return a weight in the row order and offset of llama.cpp."""
        _, _, last = place.model_name.rpartition("self_attn.")
        if self.kind.pairs and last.startswith(("q_proj.", "k_proj.")):
            halves: Tensor = weight.unflatten(0, (-1, 2, self.head_dim // 2))
            weight = halves.transpose(1, 2).reshape(weight.shape).contiguous()
        return weight + self.kind.norm_offset if place.model_name.endswith("norm.weight") else weight

    def packed(self, place: Place, weight: Tensor) -> Any:
        from gguf.quants import quantize

        values: Any = self.reordered(place, weight).numpy()
        if place.type.name == "F16" and bool((np.abs(values) > _LARGEST_F16).any()):
            raise CheckpointError(
                f"quant={self.quant}: {place.source} has a value out of the range of f16. Set quant=bf16."
            )
        return np.ascontiguousarray(quantize(values, place.type)).view(np.uint8).reshape(place.stored_shape)

    def rope_factors(self) -> Any:
        """Return the divisors of the RoPE frequencies if the metadata cannot express them, else None."""
        rope, _ = self.rope
        if rope["rope_type"] != "llama3":
            return None
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.numbers, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        return (plain / scaled.double()).float().numpy()

    def writer(self, file: Path) -> Any:
        """Return a writer with the metadata of the model."""
        import gguf

        numbers, (rope, local) = self.numbers, self.rope
        writer: Any = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[self.kind.architecture]])
        window = getattr(numbers, "sliding_window", None)
        context = numbers.max_position_embeddings
        if self.kind.window_every:
            writer.add_sliding_window(window)
            writer.add_rope_freq_base_swa(local["rope_theta"])
        elif window:
            context = min(context, window)  # beyond it, transformers attends to less than llama.cpp
        writer.add_block_count(numbers.num_hidden_layers)
        writer.add_context_length(context)
        writer.add_embedding_length(numbers.hidden_size)
        writer.add_feed_forward_length(numbers.intermediate_size)
        writer.add_head_count(numbers.num_attention_heads)
        writer.add_head_count_kv(numbers.num_key_value_heads or numbers.num_attention_heads)
        writer.add_layer_norm_rms_eps(numbers.rms_norm_eps)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_vocab_size(numbers.vocab_size)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{self.quant.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        return writer


def describe(numbers: Any, quant: str) -> GgufModel:
    """Return the model; raise for settings that llama.cpp would compute differently."""
    if numbers.model_type not in KINDS:
        raise ConfigError(
            f"kind=gguf: model type {numbers.model_type} is not supported, only {', '.join(KINDS)}. {OTHER_WAY}"
        )
    model = GgufModel(KINDS[numbers.model_type], numbers, quant)
    every, layers = model.kind.window_every, getattr(numbers, "layer_types", None) or []
    windowed = [at for at, layer in enumerate(layers) if layer == "sliding_attention"]
    expected = [at for at in range(len(layers)) if (at + 1) % every] if every else []
    attends = getattr(numbers, "query_pre_attn_scalar", model.head_dim)
    unknown = {f"rope_type={rope['rope_type']}" for rope in model.rope if not _is_known_rope(model.kind, rope)}
    if windowed and windowed != expected and not (not every and len(windowed) == len(layers)):
        unknown.add("layer_types")
    if attends != model.head_dim:
        unknown.add(f"query_pre_attn_scalar={attends}")
    unknown |= {name for name in ("final_logit_softcapping", "attn_logit_softcapping") if getattr(numbers, name, None)}
    if unknown:
        raise ConfigError(
            f"kind=gguf: the model's config.json has {', '.join(sorted(unknown))}, which is not supported. {OTHER_WAY}"
        )
    return model


def _is_known_rope(kind: Kind, rope: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp computes the same RoPE; it scales all layers by YaRN, also those with a window."""
    if rope["rope_type"] == "yarn" and (kind.window_every or not rope.keys() <= _YARN):
        return False
    return rope["rope_type"] in ("default", "linear", "llama3", "yarn") and rope.get("partial_rotary_factor", 1) == 1


# ---- gguf vocabulary


_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_DIGIT = "\\p{N}"
_ENDS = "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_BEFORE = "[^\\r\\n\\p{L}\\p{N}]?"
_WORDS = f"{_SHORT}|{_BEFORE}\\p{{L}}+"
_OTHERS = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
_OTHERS_SLASH = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*"
_CASED = f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*"
# llama.cpp's name by the expressions that split text, in order, and whether whole words take precedence over merges
PRE_TOKENIZERS = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((f"{_WORDS}|\\p{{N}}{{1,3}}{_OTHERS}{_ENDS}",), True): "llama-bpe",
    ((f"{_WORDS}|\\p{{N}}{{1,3}}{_OTHERS}{_ENDS}",), False): "smaug-bpe",
    ((f"{_WORDS}|\\p{{N}}{_OTHERS}{_ENDS}",), False): "qwen2",
    ((f"{'|'.join(_CASED)}|\\p{{N}}{_OTHERS_SLASH}{_ENDS}",), True): "tekken",
    ((f"{f'{_SHORT}?|'.join(_CASED)}{_SHORT}?|\\p{{N}}{{1,3}}{_OTHERS_SLASH}{_ENDS}",), False): "gpt-4o",
}
_BLANKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIXED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _BLANKS]}
_BETWEEN_BLANKS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_PREPEND = {"type": "Prepend", "prepend": " "}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTENT = re.compile(r"\bmessage(?:\['content'\]|\[\"content\"\]|\.content)")
HARD_TEXTS = (
    "It's 1234567 o'clock; they'LL say \"we've  3.14\" (don't!)",
    "a\n\nb \n  c\t\td   \r\n e",
    "naïve Ünïcode — 中文字符 日本語テキスト русский текст العربية",
    "🙂👩‍👩‍👧 x=f(y[0])+{z}//path/to/file#tag @me $5.00 100%",
    "CamelCaseWord HTTPServer iPhone15 v2.0.1-beta __init__",
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer of a GGUF file, with texts and conversations that llama.cpp must tokenize the same."""

    model: str  # llama.cpp's name of the algorithm
    tokens: list[str]
    types: list[int]
    template: str | None
    ends: list[int]  # tokens that end an answer, the tokenizer's EOS first
    special: Mapping[str, int | None]
    adds: tuple[bool, bool]  # whether BOS and EOS are added to every text
    pre: str | None = None
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False
    texts: Sequence[tuple[str, list[int]]] = ()
    chats: Sequence[tuple[list[dict[str, str]], list[int]]] = ()

    @property
    def bytes(self) -> int:
        """Size of the metadata, with a length in front of every text."""
        return sum(len(text.encode()) + 12 for text in (*self.tokens, *self.merges)) + len(self.template or "")

    def add_to(self, writer: Any, rows: int) -> None:
        """Add the metadata. `rows`: of the embedding; those without a token are marked unused."""
        import gguf

        beyond = range(len(self.tokens), rows)
        writer.add_tokenizer_model(self.model)
        writer.add_token_list([*self.tokens, *(f"[PAD{at}]" for at in beyond)])
        writer.add_token_types([*self.types, *(gguf.TokenType.UNUSED for _ in beyond)])
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores([*self.scores, *(0.0 for _ in beyond)])
        for name, token in self.special.items():
            if token is not None:
                getattr(writer, f"add_{name}_token_id")(token)
        if self.ends:
            writer.add_eos_token_id(self.ends[0])
        if len(self.ends) > 1:
            writer.add_eot_token_id(self.ends[1])
        writer.add_add_bos_token(self.adds[0])
        writer.add_add_eos_token(self.adds[1])
        writer.add_add_space_prefix(self.space_prefix)
        if self.template is not None:
            writer.add_chat_template(self.template)


def vocabulary_of(tokenizer: Any, ends: list[int]) -> Vocabulary:
    """Return the vocabulary of a tokenizer; raise if llama.cpp has no equivalent."""
    config = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = config["model"], config["added_tokens"]
    if model["type"] != "BPE":
        raise ConfigError(f"kind=gguf: {model['type']} tokenizers are not supported, only BPE. {OTHER_WAY}")
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    template, plain = tokenizer.chat_template, tokenizer.backend_tokenizer
    if isinstance(template, dict):
        template = template.get("default")
    texts = [(text, plain.encode(text, add_special_tokens=False).ids) for text in HARD_TEXTS]
    parts: dict[str, Any] = {"texts": texts}
    if model.get("byte_fallback"):
        parts |= {"model": "llama", "scores": _scores(model, merges), "space_prefix": _has_prefix(config)}
    else:
        parts |= {"model": "gpt2", "pre": _pre_tokenizer(config), "merges": [" ".join(pair) for pair in merges]}
        if config["normalizer"] == _PREPEND:
            parts["texts"] = [(f" {text}", ids) for text, ids in texts]
            plain = Tokenizer.from_str(json.dumps(config | {"normalizer": None}))
            template = None if template is None else _CONTENT.sub(r"((' ' ~ \g<0>) if \g<0> else '')", template)
    tokens, types = _tokens(model, added)
    eos = tokenizer.eos_token_id
    ids, inside = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    is_framed = template is None and ids != inside
    return Vocabulary(
        **parts,
        tokens=tokens,
        types=types,
        template=template,
        chats=[] if template is None else _chats(tokenizer, template, plain),
        ends=sorted(ends, key=lambda token: token != eos),
        special={"bos": tokenizer.bos_token_id, "pad": tokenizer.pad_token_id, "unk": tokenizer.unk_token_id},
        adds=(is_framed and ids[0] == tokenizer.bos_token_id, is_framed and ids[-1] == eos),
    )


def _tokens(model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[int]]:
    """Return the texts and types of all tokens, by id."""
    from gguf import TokenType

    number = 1 + max([*model["vocab"].values(), *(token["id"] for token in added)])
    tokens, types = [f"[PAD{at}]" for at in range(number)], [int(TokenType.UNUSED)] * number
    for text, at in model["vocab"].items():
        is_byte = model.get("byte_fallback") and _BYTE.fullmatch(text)
        tokens[at], types[at] = text, int(TokenType.BYTE if is_byte else TokenType.NORMAL)
    for token in added:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], int(kind)
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = int(TokenType.UNKNOWN)
    return tokens, types


def _pre_tokenizer(config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer; raise if it is unknown."""
    normalizer, steps = config["normalizer"], config["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    patterns: list[str | None] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
                patterns.append(regex)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(_DIGIT)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses}:
                patterns += [_GPT2] if uses else []
            case _:
                patterns.append(None)
    name = PRE_TOKENIZERS.get((tuple(map(str, patterns)), bool(config["model"].get("ignore_merges"))))
    if name is None or steps[-1].get("type") != "ByteLevel" or normalizer not in (None, {"type": "NFC"}, _PREPEND):
        raise ConfigError(
            "kind=gguf: llama.cpp has no known equivalent of the tokenizer's normalizer and pre-tokenizer: "
            f"{json.dumps(normalizer)}, {json.dumps(config['pre_tokenizer'])[:300]}. {OTHER_WAY}"
        )
    return name


def _has_prefix(config: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer in the style of SentencePiece puts a space before each text."""
    normalizer = config["normalizer"]
    if normalizer not in (_BLANKS, _PREFIXED) or config["pre_tokenizer"] not in (None, _BETWEEN_BLANKS):
        raise ConfigError(
            "kind=gguf: llama.cpp does not support the tokenizer's normalizer or pre-tokenizer: "
            f"{json.dumps(normalizer)[:300]}. {OTHER_WAY}"
        )
    return bool(normalizer == _PREFIXED)


def _scores(model: Mapping[str, Any], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return a score for each token: the earlier its first merge, the higher."""
    scores = [-float(len(merges))] * (1 + max(model["vocab"].values()))
    for rank, pair in reversed(list(enumerate(merges))):
        scores[model["vocab"]["".join(pair)]] = -float(rank)
    return scores


def _chats(tokenizer: Any, template: str, plain: Tokenizer) -> list[tuple[list[dict[str, str]], list[int]]]:
    """Return conversations with their prompt tokens; raise if the template cannot add the spaces llama.cpp lacks."""
    question, *others = HARD_TEXTS
    questions = [{"role": "user", "content": text.strip()} for text in (question, *others)]
    chats = [[message] for message in questions]
    chats.append([questions[0], {"role": "assistant", "content": others[0].strip()}, questions[2]])
    tokenized = []
    for messages in chats:
        try:
            text = render_chat(tokenizer, messages, ask=True, options={"chat_template": template})
            original = render_chat(tokenizer, messages, ask=True)
        except ConversationRefused:
            continue
        ids = tokenizer(original, add_special_tokens=False).input_ids
        if plain.encode(text, add_special_tokens=False).ids != ids:
            raise ConfigError(
                "kind=gguf: the tokenizer puts a space before each text, which llama.cpp does not, and the chat "
                f"template cannot add it. {OTHER_WAY}"
            )
        tokenized.append((messages, ids))
    return tokenized


def modelfile(name: str, tokenizer: Any, vocabulary: Vocabulary) -> str:
    """Return the Modelfile for Ollama."""
    lines = [f"FROM ./{name}"]
    go = None if vocabulary.template is None else _go_template(tokenizer, vocabulary.template)
    if go is not None:
        lines.append(f'TEMPLATE """{go}"""')
    elif vocabulary.template is not None:
        lines.append("# The chat template is more than fixed text around messages: write TEMPLATE in Ollama's syntax.")
    lines += [f"PARAMETER stop {json.dumps(vocabulary.tokens[token])}" for token in vocabulary.ends]
    return "\n".join(lines) + "\n"


def _go_template(tokenizer: Any, template: str) -> str | None:
    """Return the template in Go if it only puts fixed text around messages, else None."""

    def render(*roles: str, ask: bool = False) -> str:
        messages = [{"role": role, "content": f"<{role} {at}>"} for at, role in enumerate(roles)]
        return render_chat(tokenizer, messages, ask=ask, options={"chat_template": template})

    user, answer = "<user 0>", "<assistant 1>"
    try:
        one, both, three = render("user"), render("user", "assistant"), render("user", "assistant", "user")
        opened, with_system = render("user", ask=True), render("system", "user")
        head_and_before, _, after_user = one.partition(user)
        before_answer, _, after_answer = both.removeprefix(one).partition(answer)
        before_user = three.removeprefix(both).partition("<user 2>")[0]
        head = head_and_before.removesuffix(before_user)
        before_system, _, rest = with_system.removeprefix(head).partition("<system 0>")
        around = {
            "system": (before_system, rest.partition(before_user + "<user 1>")[0]),
            "user": (before_user, after_user),
            "assistant": (before_answer, after_answer),
        }
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        texts = [around[role][0] + f"<{role} {at}>" + around[role][1] for at, role in enumerate(roles)]
        asks = opened.removeprefix(one)
        whole = head + "".join(texts) + asks
        if render(*roles, ask=True) != whole or any(mark in whole for mark in ("{{", '"""')):
            return None
    except ConversationRefused:
        return None
    cases = [
        f'{{{{ {"else " if at else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for at, (role, (before, after)) in enumerate(around.items())
    ]
    return f"{head}{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}{asks}"
