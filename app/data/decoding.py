"""Bytes to text. Files are UTF-8; what else they are is told, never guessed into rows."""

_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
LOOK = 64  # bytes of a file that show its encoding


def other_encoding(start: bytes) -> str:
    """What is wrong with a file that begins so, in words; empty where it may be UTF-8."""
    found = next((name for mark, name in _MARKS if start.startswith(mark)), "")
    found = found or _unmarked(start[:LOOK])
    if not found:
        return ""
    return f"is {found}, expected UTF-8; save it as UTF-8, or type: iconv -f {found} -t UTF-8 OLD > NEW"


def _unmarked(start: bytes) -> str:
    """UTF-16 of Latin letters has a NUL in every other byte; text in UTF-8 has none at all."""
    even, odd = start[0::2], start[1::2]
    if odd and all(even) and not any(odd):
        return "UTF-16LE"
    return "UTF-16BE" if odd and all(odd) and not any(even) else ""


def nul_in(line: bytes | str, before: int = 0) -> str:
    """Where the first NUL is, in words; empty if there is none. `before`: how much came before the line."""
    at = line.find(b"\0") if isinstance(line, bytes) else line.find("\0")
    if at < 0:
        return ""
    unit = "byte" if isinstance(line, bytes) else "character"
    return f"{unit} {before + at + 1} is NUL, which no text has: the file is damaged, or not text"


def not_utf8(error: UnicodeDecodeError) -> str:
    """Which byte, in words."""
    found = error.object[error.start]
    return f"not UTF-8 at byte {error.start + 1} of the line (0x{found:02x}); save the file as UTF-8"


def printable(text: str) -> str:
    """Without what a terminal obeys or a file cannot hold: it may come from a row, and goes into messages."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
