"""Tiny random models of the kinds that are written as GGUF, with tokenizers of their sorts, and their proof."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from app.assets import ROOT
from app.exports import reload
from app.exports.gguf import QUANTS, by_llama_cpp, read_back, write_gguf
from app.exports.gguf_model import HARD_TEXTS, PRE_TOKENIZERS, Place, Vocabulary, describe, vocabulary_of
from app.exports.verify import Limits, Reference, Verification, verify

BOS, END = "<s>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCABULARY = 700
SHAPE = {
    "vocab_size": VOCABULARY + 4,  # rows of the embedding that no token has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that a wrong row shows
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
BOTH_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERS = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
_BLANKS = normalizers.Replace(" ", "▁")
NORMALIZERS = {"pieces": _BLANKS, "pieces after a blank": normalizers.Sequence([normalizers.Prepend("▁"), _BLANKS])}
# the configuration of each kind, and how its tokenizer splits text: llama.cpp's name for it, or like SentencePiece
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}, "tie_word_embeddings": True},
        "llama-bpe",
    ),
    "mistral": ({"sliding_window": None}, "pieces after a blank"),
    "qwen2": ({"head_dim": 16}, "qwen2"),
    "qwen3": ({"tie_word_embeddings": False, "rope_parameters": YARN}, "qwen2"),
    "gemma3_text": (
        {"rope_parameters": BOTH_ROPES, "sliding_window": 8, "query_pre_attn_scalar": 32, **LAYERS},
        "pieces",
    ),
}


def texts() -> list[str]:
    rows = (ROOT / "sample" / "train.jsonl").read_text().splitlines()[:300]
    return [json.loads(row)["messages"][0]["content"] for row in rows] + [*HARD_TEXTS] * 20


def tokenizer(pre: str) -> Any:
    """A BPE of bytes whose text is split as llama.cpp's `pre` does, or one like SentencePiece's."""
    found = sentence_pieces(pre) if pre in NORMALIZERS else byte_pairs(pre)
    found.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=found, bos_token=BOS, eos_token=END)
    wrapped.chat_template = TEMPLATE
    return wrapped


def byte_pairs(pre: str) -> Tokenizer:
    (patterns, whole_words), *_ = (known for known, name in PRE_TOKENIZERS.items() if name == pre)
    found = Tokenizer(models.BPE(ignore_merges=whole_words))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_text])
    found.train_from_iterator(texts(), trainer(pre_tokenizers.ByteLevel.alphabet()))
    return found


def sentence_pieces(sort: str) -> Tokenizer:
    """As converted from SentencePiece: bytes for unknown characters, and each way to make a piece among the merges."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _BLANKS
    trained.train_from_iterator([text[:60] for text in texts()[:300]], trainer([]))
    learnt = json.loads(trained.to_str())["model"]["vocab"]
    bytes_ = [f"<0x{at:02X}>" for at in range(256)]
    pieces = [BOS, END, "<unk>", *bytes_, *(each for each in sorted(learnt, key=learnt.get) if each not in (BOS, END))]
    vocabulary = {piece: at for at, piece in enumerate(pieces[:VOCABULARY])}
    merges = [
        (piece[:at], piece[at:])
        for piece in list(vocabulary)[259:]
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = NORMALIZERS[sort]
    found.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (BOS, END)])
    return found


def trainer(alphabet: list[str]) -> trainers.BpeTrainer:
    special = [AddedToken(each, special=True, normalized=False) for each in (BOS, END)]
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )


@dataclass
class Small:
    """A model of a kind, its file, and what llama.cpp makes of that."""

    kind: str
    folder: Path
    quant: str = "bf16"
    pre: str | None = None  # in place of the kind's own

    @cached_property
    def lm(self) -> Any:
        torch.manual_seed(0)
        numbers = transformers.AutoConfig.for_model(self.kind, **SHAPE | KINDS[self.kind][0])
        lm: Any = transformers.AutoModelForCausalLM.from_config(numbers, attn_implementation="eager").eval()
        for name, weight in lm.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.data.uniform_(-0.5, 0.5).add_(0.0 if self.kind.startswith("gemma") else 1.0)
            place = self._place(lm, name, weight)
            packed = quantize(weight.detach().numpy(), place.type)  # what the file holds
            weight.data = torch.from_numpy(dequantize(packed, place.type).copy()).view(weight.shape)
        return lm

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer(self.pre or KINDS[self.kind][1])

    def _place(self, lm: Any, name: str, weight: Tensor) -> Place:
        return describe(lm.config, self.quant).place(name, name, tuple(weight.shape))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, [self.tokenizer.eos_token_id])

    @cached_property
    def reference(self) -> Reference:
        """Two rows of text, with the logits of transformers; the targets are what it finds likely and unlikely."""
        rows: dict[str, Tensor] = {}
        for at, text in enumerate(HARD_TEXTS[:2]):
            rows[f"ids.{at}"] = torch.tensor(self.tokenizer(text).input_ids)
            rows[f"at.{at}"] = torch.arange(len(rows[f"ids.{at}"]))[-20:]
        logits = list(reload.logits(self.lm, rows, "cpu").values())
        targets = [each.topk(3).indices[:, at] for at, each in enumerate(logits)]
        return Reference(rows, targets, logits, "other")

    def proof(self) -> Verification:
        weights = dict(self.lm.named_parameters())  # a tied head is not among them
        model = describe(self.lm.config, self.quant)
        places = [self._place(self.lm, name, each) for name, each in weights.items()]
        file = self.folder / "model.gguf"
        digests = write_gguf(file, model, self.vocabulary, places, lambda name: weights[name].detach())
        assert read_back(file, digests) is None
        found = by_llama_cpp(file, self.vocabulary, self.reference, 1)
        return verify(self.reference, found, Limits("loss_difference", QUANTS[self.quant], "of a test"))
