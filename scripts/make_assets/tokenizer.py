"""The tokenizers that ship.

That of the small model is byte-level BPE in which a word has the same id wherever it stands. Encoders with random
weights take the other, which is WordPiece as BERT has it, with a mask token.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 1536
PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"  # of training, so that no merge joins digits
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
    """The content of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    # Every stretch between special tokens starts with a blank, so that a word at the start of a turn is the
    # word inside a sentence; decoding takes those blanks away again.
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    unblank = [decoders.Replace(f"{token} ", token) for token in SPECIAL]
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0), *unblank])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's, which other programs know
    return _as_json(tokenizer)


def make_wordpiece(texts: Iterable[str]) -> str:
    """The content of tokenizer.json: BERT's normalisation; characters, frequent words and endings; [CLS] text [SEP].

    The trainer of tokenizers settles ties by the hashes of a process, so that its files differ from run to run.
    """
    _, unknown, first, end, _ = special = list(WORDPIECE_SPECIAL.values())
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words, endings = Counter[str](), Counter[str]()
    for text in texts:
        words.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
    for word, count in words.items():
        endings.update({f"##{word[-length:]}": count for length in ENDINGS if length < len(word)})
    characters = sorted({character for word in words for character in word})
    frequent, common_endings = (sorted(each, key=lambda piece: (-each[piece], piece)) for each in (words, endings))
    pieces = [
        *special,
        *characters,
        *(f"##{each}" for each in characters),
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
    """The content of tokenizer_config.json."""
    return json.dumps(CONFIG, indent=2) + "\n"


def wordpiece_config() -> str:
    """The content of tokenizer_config.json."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **WORDPIECE_SPECIAL,
        "model_max_length": LONGEST,
    }
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return json.dumps(settings, indent=2) + "\n"
