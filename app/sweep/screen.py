"""What a sweep shows: lines that stay and, on a terminal, one below them that moves."""

import shutil
import sys
from typing import TextIO, cast

from rich.console import Console as Terminal
from rich.table import Table

from app.record.console import SafeStream
from app.record.lines import printable
from app.record.masking import masked_text

_WIDTH_OF_A_FILE = 240
_BEGINNING_OF_LINE, _ERASE = "\r", "\x1b[2K"


class Screen:
    """On standard output, unless another stream is given."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = SafeStream(stream or sys.stdout)
        self._moves = self._stream.is_terminal()
        self._line = ""

    def say(self, text: str) -> None:
        """It stays; the moving line is gone."""
        self.show("")
        self._stream.write(f"{printable(masked_text(text))}\n")
        self._stream.flush()

    def show(self, text: str) -> None:
        """In place of what was shown so before; nowhere but on a terminal."""
        if self._moves and text != self._line:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"{_BEGINNING_OF_LINE}{_ERASE}{printable(text)[:width]}")
            self._stream.flush()
            self._line = text

    def table(self, table: Table) -> None:
        """As wide as it needs to be where there is no terminal to fit."""
        self.show("")
        width = None if self._moves else _WIDTH_OF_A_FILE
        file = cast(TextIO, self._stream)
        Terminal(file=file, width=width, markup=False, highlight=False, emoji=False).print(table)
