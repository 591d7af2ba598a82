"""Render conversations with chat templates, in a sandbox with time and size limits; errors have the template line.

A time limit cannot stop a single call such as `'a' * 10**10`, because Python handles signals between calls. So the
result size is computed before operations that can be much larger than their arguments.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from string import Formatter
from types import BuiltinMethodType, FrameType, FunctionType
from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.filters import do_join, make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

from app.errors import ConfigError

MAX_SIZE = 1 << 27  # characters or elements of one value; at most half as many in a data row
_MAX_BITS = 100_000  # of an integer
_LINES = 1 << 12  # assumed number of values for an indent or precision
_SEQUENCES = (str, bytes, list, tuple)
_INTERPOLATED = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([\d*]*)(?:\.([\d*]*))?")  # width and precision


def _width(_value: Any, *args: Any, **named: Any) -> int:
    return max((value for value in (*args, *named.values()) if isinstance(value, int)), default=0)


def _length(value: Any) -> Any:
    return len(value) if isinstance(value, _SEQUENCES) else value or 0


def _longest(values: Iterable[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, _SEQUENCES)), default=1)


def _widths(specs: Iterable[str], values: Iterable[Any]) -> int:
    """Return the sum of the widths in format specs; for a width from an argument, the largest integer of `values`."""
    largest = max((abs(value) for value in values if isinstance(value, int)), default=0)
    return sum(
        largest if "*" in spec or "{" in spec else sum(map(int, re.findall(r"\d+", spec))) for spec in specs if spec
    )


def _formatted(text: str, *args: Any, **named: Any) -> int:
    values = [*args, *named.values()]
    fields = [spec for _, name, spec, _ in Formatter().parse(text) if name is not None]
    return _widths(filter(None, fields), values) + len(fields) * _longest(values)


def _interpolated(text: Any, *args: Any, **named: Any) -> int:
    values = [*args, *named.values()]
    fields = [spec for match in _INTERPOLATED.findall(str(text)) for spec in match]
    return _widths(fields, values) + len(fields) * _longest(values)


# upper bound of the result size of a method or filter, from the value and its arguments; with filters of jinja
_METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch"), _width),
    "expandtabs": lambda text, tabsize=8, **__: text.count("\t") * tabsize,
    "indent": lambda text, width=4, *_, **__: (str(text).count("\n") + 1) * _length(width),
    "replace": lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new)),
    "translate": lambda text, table, **__: len(text) * _longest(table.values() if isinstance(table, dict) else table),
    "wordwrap": lambda text, _width=79, _long=True, wrapstring="", **__: len(str(text)) * _length(wrapstring),
    "round": lambda _value, precision=0, *_, **__: _LINES * abs(precision),
    "tojson": lambda _value, _ascii=False, indent=None, *_, **__: _LINES * _length(indent),
    "format": _formatted,
    "format_map": lambda text, mapping, **__: _formatted(text, *mapping.values()),
}
_FILTERS = {**_METHODS, "format": _interpolated}


def _require(size: Any, name: str) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"{name} creates a value of more than {MAX_SIZE:,} characters")


def _measured(values: Iterable[Any], separator: int) -> Iterator[Any]:
    """Yield values to join; SecurityError before their total is too long."""
    size = 0
    for value in values:
        size += len(str(value)) + separator
        _require(size, "join")
        yield value


@pass_eval_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return do_join(context, _measured(items, len(str(d))), d)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a size check. Some filters take a context before the value."""
    contexts, size = int(hasattr(function, "jinja_pass_arg")), _FILTERS[name]

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        _require(size(*args[contexts:], **named), name)
        return function(*args, **named)

    return checked


def _product_size(operator: str, left: Any, right: Any) -> Any:
    """Return the size of `left * right` or `left ** right`; integers with too many bits are too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return 0 if bits <= _MAX_BITS else MAX_SIZE + 1
    sizes = [_length(value) for value in (left, right) if isinstance(value, (*_SEQUENCES, int))]
    return sizes[0] * sizes[1] if len(sizes) == 2 else 0


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802  (the name that jinja calls)
        """Write `a ~ b` as a call of the bounded `concat` of the environment."""
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox environment of a chat template."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def from_string(self, *args: Any, **named: Any) -> Any:
        """Return the template with bounded filters instead of the current ones."""
        self.filters |= {name: _checked(name, self.filters[name]) for name in _FILTERS if name in self.filters}
        self.filters["join"] = _join
        return super().from_string(*args, **named)

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join the output of a template, block or macro."""
        parts = list(texts)
        _require(sum(map(len, parts)), "the template")
        return "".join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation; SecurityError if its result is too large."""
        if operator == "+":
            if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
                _require(len(left) + len(right), operator)
            return left + right
        if operator != "%":
            _require(_product_size(operator, left, right), operator)
        elif isinstance(left, str):
            values = right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else (right,)
            _require(_interpolated(left, *values), operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __called: Any, *args: Any, **named: Any) -> Any:  # noqa: N805  (as in jinja)
        """Call a function or method; SecurityError if its result is too large."""
        # jinja wraps `format` in a function
        method: Any = getattr(__called, "__wrapped__", None) if isinstance(__called, FunctionType) else __called
        owner = method.__self__ if isinstance(method, BuiltinMethodType) else None
        if isinstance(owner, str | bytes | int) and method.__name__ in _METHODS:
            _require(_METHODS[method.__name__](owner, *args, **named), method.__name__)
        elif isinstance(owner, str | bytes) and method.__name__ == "join":
            args = tuple(_measured(values, len(owner)) for values in args)
        return super().call(__context, __called, *args, **named)


@cache
def bounded(render: Callable[..., str]) -> Callable[..., str]:
    """Return `apply_chat_template` of transformers with this sandbox; overrides of other classes are unchanged.

    transformers creates its sandbox inside the function that compiles a template, without an option. So this function
    and its two callers are copied with one global replaced in each; the originals are not modified.
    """
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils as theirs

    if render is not PreTrainedTokenizerBase.apply_chat_template:
        return render
    compiled = _with_global(theirs._cached_compile_jinja_template, ImmutableSandboxedEnvironment=Sandbox)
    rendered = _with_global(theirs.render_jinja_template, _compile_jinja_template=lru_cache(compiled))
    return _with_global(render, render_jinja_template=rendered)


def _with_global(function: Any, **replaced: Any) -> Callable[..., Any]:
    """Return a copy of a function with these globals replaced."""
    names = {**function.__globals__, **replaced}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ---- chat rendering


MAX_SECONDS = 10.0  # per rendering, which usually takes about 0.0001 s
_REMEDY = "Fix it, or set another: model.chat_template=FILE or the name of a built-in template"


# errors that a template can cause, besides those of jinja
_OF_PROGRAMS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class ConversationRefused(Exception):  # noqa: N818  (raised by the template itself)
    """Conversation rejected by the template; the message has the reason."""


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
    """Render messages; `ask` adds the generation prompt. ConfigError if the template itself is broken."""
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
        raise ConfigError(f"model.chat_template: not allowed: {str(error).rstrip('.')}. {_REMEDY}.") from error
    except (TemplateError, TypeError) as error:  # TypeError: it concatenates text and another type
        raise ConversationRefused(str(error)) from error
    except _TooSlow:
        raise ConfigError(
            f"model.chat_template: rendering one conversation takes more than {MAX_SECONDS:g} seconds. {_REMEDY}."
        ) from None
    except Exception as error:  # any error of a program: division by zero, recursion, out of memory
        what = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
        raise ConfigError(f"model.chat_template: fails with {what}{_line_of(error)}. {_REMEDY}.") from error
    return text


def render_text(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str | None:
    """Render messages by the text of a template, without a tokenizer; None if it rejects them or is broken.

    None also outside the main thread, where the time is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def reject(reason: str) -> None:
        raise TemplateError(reason)

    try:
        with _time_limit():
            return str(environment.from_string(template).render(messages=messages, raise_exception=reject, **names))
    except (*_OF_PROGRAMS, TemplateError, _TooSlow):
        return None


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _TooSlow after the time limit; only in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(
        signal.ITIMER_REAL, MAX_SECONDS, 1.0
    )  # repeat every second, because the first exception may be lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _line_of(error: Exception) -> str:
    """Return the innermost template line in the traceback, as text."""
    line, frame = None, error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<template>" else line
        frame = frame.tb_next
    return "" if line is None else f" at line {line}"
