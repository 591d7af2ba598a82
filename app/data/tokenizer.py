"""What this folder asks of a tokenizer of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.config.dataset import CHAT_FORMATS, LABELLED_FORMATS
from app.data.shapes import Message
from app.errors import ConfigError


class Encoding(Protocol):
    """One tokenised text of the fast backend."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""

    @property
    def type_ids(self) -> list[int]:
        """Of each token the side of a pair, as models count them."""

    @property
    def sequence_ids(self) -> list[int | None]:
        """Of each token the text that it is of; None for what frames them."""

    def char_to_token(self, char_pos: int) -> int | None:
        """The token that holds a character, if one does."""

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters that a token holds."""


class Backend(Protocol):
    """The Rust tokenizer inside."""

    def encode_batch(
        self, input: Sequence[str | tuple[str, str]], *, add_special_tokens: bool
    ) -> list[Encoding]:
        """Many texts at once, on all threads."""

    def to_str(self) -> str:
        """Everything that decides its tokens, as JSON."""


class Tokenizer(Protocol):
    """The part of `PreTrainedTokenizerFast` that is used here."""

    is_fast: bool
    eos_token_id: int | None
    sep_token_id: int | None
    mask_token_id: int | None
    pad_token_id: int | None
    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]
    model_input_names: list[str]

    @property
    def backend_tokenizer(self) -> Backend:
        """The Rust tokenizer inside."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Which token plays which part."""

    def __call__(
        self, text: str, text_pair: str | None = None, *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, Any]:
        """Tokens of one text, or of a pair."""

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that were added to the trained vocabulary."""

    def apply_chat_template(
        self,
        conversation: list[list[Message]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> list[str]:
        """Each conversation as text."""


def check_tokenizer(tokenizer: Tokenizer, fmt: str) -> None:
    """ConfigError if it cannot serve rows of the format `fmt`."""
    if not tokenizer.is_fast:
        raise ConfigError(
            "model.tokenizer: only tokenizers of the fast kind (tokenizer.json) are supported: the others"
            " cannot tell which characters a token stands for"
        )
    if fmt in CHAT_FORMATS:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model.chat_template: the tokenizer has none, and dataset.format={fmt} needs one;"
                " set model.chat_template=FILE or one of the names that ship"
            )
    elif fmt not in LABELLED_FORMATS and tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise ConfigError(f"model.tokenizer: it has no end-of-text token, and dataset.format={fmt} needs one")


def parts_pairs(tokenizer: Tokenizer) -> bool:
    """Whether something of the tokenizer's own stands between the texts of a pair."""
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([("a", "b")], add_special_tokens=True)
    owners = encoding.sequence_ids
    return None in owners[owners.index(0) : owners.index(1)]
