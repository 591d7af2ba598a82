"""A long text in pieces that are tokenised one by one, so that memory does not grow with it."""

import re
from collections.abc import Iterator

PIECE = 1 << 18  # characters that are one text to the tokenizer
_CUT = re.compile(r"(?<=\S)\n(?=\S)")  # a lone line break: byte-level tokenizers join nothing across it


def pieces(blocks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """The text that `blocks` make, and with each piece whether it is the last. However it came, it is cut alike."""
    left = ""
    for block in blocks:
        left += block
        at = 0
        while len(left) - at > PIECE:
            end = at + PIECE
            cut = max((found.end() for found in _CUT.finditer(left, at + PIECE // 2, end)), default=end)
            yield left[at:cut], False
            at = cut
        left = left[at:]
    yield left, True
