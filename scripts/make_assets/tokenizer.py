"""The bundled tokenizers.

The tokenizer of the tiny model is byte-level BPE in which a word has the same ID at any position. Encoders with random
weights use BERT's WordPiece with a mask token.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 1536
PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"  # for training, so that no merge joins digits
LONGEST = 512
WORDPIECE_VOCABULARY, WORDPIECE_WORDS = 1500, 1000
ENDINGS = (2, 3, 4)  # characters
WORDPIECE_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "eos_token": END,
    "bos_token": None,
    "unk_token": None,
    "additional_special_tokens": list(SPECIAL[2:]),
    "clean_up_tokenization_spaces": False,
    "model_max_length": LONGEST,
    "padding_side": "right",
}


def train(texts: Iterable[str]) -> str:
    """Return a BPE tokenizer.json trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    # Text after a special token starts with a space, so that a word at the start of a turn has the ID of the
    # word inside a sentence; decoding removes these spaces.
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    strip_spaces = [decoders.Replace(f"{token} ", token) for token in SPECIAL]
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0), *strip_spaces])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )  # as in GPT-2, which other programs support
    return _as_json(tokenizer)


def make_wordpiece(texts: Iterable[str]) -> str:
    """Return a WordPiece tokenizer.json: BERT normalization; characters, frequent words and endings; [CLS] text [SEP].

    The trainer of `tokenizers` is not used: it breaks ties by hashes of the process, so its files differ between runs.
    """
    _, unknown, first, end, _ = special = list(WORDPIECE_SPECIAL.values())
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words, endings = Counter[str](), Counter[str]()
    for text in texts:
        words.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
    for word, count in words.items():
        endings.update({f"##{word[-length:]}": count for length in ENDINGS if length < len(word)})
    characters = sorted({character for word in words for character in word})
    frequent, common_endings = (
        sorted(counts, key=lambda piece: (-counts[piece], piece)) for counts in (words, endings)
    )
    pieces = [
        *special,
        *characters,
        *(f"##{character}" for character in characters),
        *frequent[:WORDPIECE_WORDS],
        *common_endings,
    ]
    vocabulary = {piece: at for at, piece in enumerate(list(dict.fromkeys(pieces))[:WORDPIECE_VOCABULARY])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, end)],
    )
    return _as_json(tokenizer)


def _as_json(tokenizer: Tokenizer) -> str:
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n"


def config() -> str:
    """Return the BPE tokenizer_config.json."""
    return json.dumps(CONFIG, indent=2) + "\n"


def wordpiece_config() -> str:
    """Return the WordPiece tokenizer_config.json."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **WORDPIECE_SPECIAL,
        "model_max_length": LONGEST,
    }
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return json.dumps(settings, indent=2) + "\n"
