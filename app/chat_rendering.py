"""Rendering of conversations by chat templates, bounded in time and size; errors name the template and its line."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from app.chat_sandbox import bounded
from app.errors import ConfigError

MAX_SECONDS = 10.0  # of one rendering, which takes about 0.0001
_REMEDY = "Mend it, or give another: model.chat_template=FILE, or a name that ships"


class ConversationRefused(Exception):  # noqa: N818  (the template's own decision, no fault)
    """The template does not take this conversation; the message says why."""


class _TooSlow(Exception):  # noqa: N818
    pass


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    ask: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render messages; `ask` adds what opens the next answer. ConfigError if the template itself is at fault."""
    try:
        with _time_limit():
            render = bounded(type(tokenizer).apply_chat_template)
            text: str = render(
                tokenizer, list(messages), tools=tools, tokenize=False, add_generation_prompt=ask, **(options or {})
            )
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template: line {error.lineno}: {str(error.message).rstrip('.')}. {_REMEDY}."
        ) from error
    except SecurityError as error:
        raise ConfigError(f"model.chat_template: it may not do this: {str(error).rstrip('.')}. {_REMEDY}.") from error
    except (TemplateError, TypeError) as error:  # a TypeError: it adds text to what is none
        raise ConversationRefused(str(error)) from error
    except _TooSlow:
        raise ConfigError(
            f"model.chat_template: it takes more than {MAX_SECONDS:g} seconds for one conversation. {_REMEDY}."
        ) from None
    except Exception as error:  # what a program may raise: a division by zero, endless recursion, no memory
        what = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
        raise ConfigError(f"model.chat_template: it ends in {what}{_line_of(error)}. {_REMEDY}.") from error
    return text


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _TooSlow in time; signals reach the main thread alone, in others a template has all the time it wants."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, 1.0)  # again each second: where it was raised it may be lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _line_of(error: Exception) -> str:
    """The innermost line of the template, as jinja writes it into the traceback."""
    line, frame = None, error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<template>" else line
        frame = frame.tb_next
    return "" if line is None else f" at line {line}"
