"""Pages that are made by the way, at the end of something that must not fail by them."""

from collections.abc import Callable
from pathlib import Path

from app.record.files import write_text


def written_page(target: Path, make: Callable[[], str]) -> str:
    """What to say: where the page is, or why there is none."""
    try:
        write_text(target, make())
    except Exception as fault:  # noqa: BLE001  whatever it is, what the page is about has not suffered
        return f"report  could not be made ({type(fault).__name__}: {fault}); nothing else is missing"
    return f"report  {target}"
