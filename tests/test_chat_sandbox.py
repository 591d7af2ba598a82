"""Chat templates that would fill the memory are refused at once; all others render as transformers does."""

import itertools
import json
import re
import time
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from app import chat_rendering
from app.assets import ROOT, template_names, template_text
from app.chat_rendering import render_chat
from app.errors import ConfigError
from tests.conftest import REPO

TEXT = "{% set x = 'a' * 10**4 %}"
LOOP = "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
BOMBS = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ ([1] * 10**10) | length }}",
    "{{ 2 ** (10**9) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' | center(10**10) }}",
    "{{ ['a'] | map('center', width=10**10) | join }}",
    "{{ 'a'.center(10**10) }}",
    "{{ ('a' | attr('ljust'))(10**10) }}",
    "{{ 'a'.rjust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ (5).to_bytes(length=10**10) }}",
    "{{ 'a\nb' | indent(10**10) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ [1] | batch(10**10, 'x') | list | length }}",
    "{{ 5 | round(-10**10) }}",
    TEXT + "{{ x.replace('a', x * 10) }}",
    TEXT + "{{ x | replace('a', x * 10) }}",
    TEXT + "{{ x.translate({97: x * 10}) }}",
    TEXT + "{{ x.join([x] * 10**5) }}",
    TEXT + "{{ ([x] * 10**5) | join }}",
    TEXT + "{{ ([{'b': x}] * 10**5) | join(attribute='b') }}",
    TEXT + "{{ range(10**5) | join(x) }}",
    TEXT + "{{ (x | list | join(' ')) | wordwrap(1, wrapstring=x * 10) }}",
    TEXT + "{{ ('{0}' * 10**5).format(x) }}",
    TEXT + "{{ ('%(b)s' * 10**5) % {'b': x} }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%.10000000000f' | format(1.0) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    LOOP + "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + LOOP + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "{% set x = 'a' * 10**8 %}{% for i in range(99) %}{{ x }}{% endfor %}",
]
# values that the bounds must leave as they are, in the spellings that templates use
ORDINARY = """
{%- for m in messages %}
{{ '=' * 10 ~ m.role | upper | center(12) ~ '|' ~ m.role.ljust(12) ~ m.role.rjust(9) ~ ('5'.zfill(3) + 'x') }}
{{ m.content | indent(2, true) ~ m.content.replace('a', 'bb') ~ m.content | replace('e', '', 1) }}
{{ m | tojson(indent=2) ~ [1, 'b', none] | join(', ') ~ messages | join('/', attribute='role') ~ '-'.join(['a', 'b']) }}
{{ '%s %05.2f%%' % (m.role, 2.5) ~ '%(a)s' % {'a': 1} ~ '%d' | format(10**12) ~ '{} {{"a": {b}}}'.format(10**12, b=3) }}
{{ '{:>{w}}'.format(1, w=3) ~ 2.567 | round(1, 'floor') ~ 2.5 | round(method='ceil') ~ 'ab'.translate({97: 'c'}) }}
{{ (2 ** 10 + 7 // 2 - 7 % 4 + 1.5 * 2) ~ ([1, 2] + [3] * 2) ~ (1 + true) ~ missing ~ none ~ [1, 2, 3] | sum }}
{{ 'a\tb'.expandtabs(4) ~ 'a b' | wordwrap(1) ~ [1, 2, 3] | batch(2, 0) | list ~ '{a}'.format_map({'a': 1}) }}
{% set b %}{{ m.content }}{{ m.content.split(' ') | length }}{% endset %}{{ b ~ b }}
{% generation %}{{ loop.index }}{% autoescape true %}{{ '<' ~ m.role }}{{ ['<', 1] | join('>') }}{% endautoescape %}
{%- endgeneration %}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "tiny")


@pytest.mark.parametrize("template", BOMBS)
def test_template_that_would_fill_the_memory_is_refused_at_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"not allowed: .* creates a value of more than 134,217,728 characters"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert time.process_time() - started < 2


def test_bounded_rendering_equals_that_of_transformers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((REPO / "tests" / "data" / "templates").glob("*.jinja"))
    templates = [ORDINARY, *map(template_text, template_names()), *(file.read_text() for file in files)]
    lines = (ROOT / "sample" / "train.jsonl").read_text().splitlines()[:20]
    chats = [json.loads(line)["messages"] for line in lines]
    thinking = {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": None}
    chats.append([{"role": "system", "content": "A\nlady"}, {"role": "user", "content": "a"}, thinking])
    bounded = chat_rendering.bounded(type(tokenizer).apply_chat_template)
    given: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    equal = 0
    for template, chat in itertools.product(templates, chats):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        try:
            expected = tokenizer.apply_chat_template(chat, **given)
        except TemplateError as refusal:
            with pytest.raises(TemplateError, match=f"^{re.escape(str(refusal))}$"):
                bounded(tokenizer, chat, **given)
            continue
        assert bounded(tokenizer, chat, **given) == expected
        equal += 1
    assert equal > 0.8 * len(templates) * len(chats)


def test_rendering_of_another_class_is_its_own() -> None:
    assert chat_rendering.bounded(render_chat) is render_chat
