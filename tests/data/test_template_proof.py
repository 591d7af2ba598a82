"""What is proved of a template holds for any words; what looks at them is not proved, however it is hidden."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.assets import ROOT
from app.data.mould import stand_ins
from app.data.template_proof import only_writes
from tests.data.shapes import HERE, SHAPES
from tests.data.small import TEMPLATES

ROLES = ("system", "user", "assistant")
LOOKING = {"empty_thoughts", "thoughts_dropped", "thoughts_of_last"}


@pytest.mark.parametrize("file", sorted((ROOT / "templates").glob("*.jinja")), ids=lambda file: file.stem)
def test_templates_that_ship_only_write(file: Path) -> None:
    assert only_writes(file.read_text(), ROLES)


@pytest.mark.parametrize("name", SHAPES)
def test_of_the_shapes_those_that_take_thoughts_apart_look(name: str) -> None:
    assert only_writes((HERE / "templates" / f"{name}.jinja").read_text(), ROLES) == (name not in LOOKING)


def test_one_that_drops_earlier_thoughts_looks() -> None:
    assert [name for name in TEMPLATES if not only_writes(TEMPLATES[name], ROLES)] == ["thinking"]


LOOKS = [
    *(
        "{{ m.content | upper }}",
        "{{ m['content'] | replace('a', 'b') }}",
        "{{ m.content[0] }}",
        "{{ m.content[1:] }}",
    ),
    *(
        "{{ m.content.split('x') }}",
        "{{ m.content.strip('x') }}",
        "{{ m.content | trim('x') }}",
        "{{ m | tojson }}",
    ),
    *(
        "{{ m.content | tojson }}",
        "{{ m.content | length }}",
        "{{ m }}",
        "{{ messages }}",
        "{{ m.content * 2 }}",
    ),
    *(
        "{{ '%r' % m.content }}",
        "{{ '{!r}'.format(m.content) }}",
        "{{ [m.content] }}",
        "{{ {'a': m.content} }}",
    ),
    *("{{ 'a' if 'x' in m.content }}", "{{ 'a' if m.content == 'x' }}", "{{ 'a' if 'x' == m.content }}"),
    *(
        "{{ 'a' if m.content > 'x' }}",
        "{{ 'a' if m.content.startswith('x') }}",
        "{{ 'a' if m == messages[0] }}",
    ),
    *(
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{% for k in m %}{{ m[k] }}{% endfor %}",
        "{{ m.items() }}",
    ),
    *("{% for k, v in m.items() %}{{ v }}{% endfor %}", "{{ m.values() | list }}", "{{ m['items']() }}"),
    *("{% set x = m.content %}{{ x | upper }}", "{% set x %}{{ m.content }}{% endset %}{{ x | upper }}"),
    "{% set x = 'a' ~ m.content %}{{ x.split('a') }}",
    "{% set n = namespace(x='') %}{% set n.x = m.content %}{{ n.x | upper }}",
    "{% set n = namespace(x=m.content) %}{{ n['x'] | upper }}",
    "{% set n = namespace(x=m.content) %}{{ n }}",
    "{% set n = namespace(x=m) %}{{ n.x.content | upper }}",
    "{% set n = namespace(x='') %}{% set k = 'x' %}{% set n.x = m.content %}{{ n[k] | upper }}",
    "{% macro f(a) %}{{ a | upper }}{% endmacro %}{{ f(m.content) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(m.content) | upper }}",
    "{% macro f() %}{{ varargs[0] | upper }}{% endmacro %}{{ f(m.content) }}",
    "{% macro f(a) %}{{ a | upper }}{% endmacro %}{% set g = f %}{{ g(m.content) }}",
    "{% macro f(a=m.content) %}{{ a | upper }}{% endmacro %}{{ f() }}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% call f() %}{{ m.content }}{% endcall %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | selectattr('content', 'equalto', 'x') | list | length }}",
    "{{ messages | tojson }}",
    "{{ (messages | last).content | upper }}",
    "{{ messages[-1]['content'] | upper }}",
    "{{ m.get('content') | upper }}",
    "{{ dict(a=m.content) }}",
    "{{ loop.previtem.content | upper }}",
    "{{ loop.changed(m.content) }}",
    "{{ loop.cycle(m.content, 'a') | upper }}",
    "{{ ['a', 'b'] | random }}",
    "{{ lipsum() }}",
    "{% with x = m.content %}{{ x | upper }}{% endwith %}",
    "{% if m.role == 'user' %}{{ m.content | upper }}{% endif %}",
    "{% for t in [{'role': 'a'}] %}{% if t.name is defined %}{{ m.content | upper }}{% endif %}{% endfor %}",
    "{% for m in [{'name': 'a'}] %}{% if m.name %}{{ messages[0].content | upper }}{% endif %}{% endfor %}",
    "{% set tools = [1] %}{% if tools %}{{ m.content | upper }}{% endif %}",
    "{% if not tools %}{{ m.content | upper }}{% endif %}",
    "{% if m.content is string and 'x' in m.content %}a{% endif %}",
    "{{ m.content is string and m.content | upper }}",
    "{{ m.name or m.content | upper }}",
    "{% if m.content is eq('x') %}a{% endif %}",
    "{% if 'x' is in(m.content) %}a{% endif %}",
    "{% if 'x' is sameas m.content %}a{% endif %}",
]
WRITES = [
    *(
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{{ m.content.strip() }}",
        "{{ 'a' ~ m.content + 'b' }}",
    ),
    *(
        "{{ m.get('content') }}",
        "{{ messages[0].content }}",
        "{{ (messages | last).content }}",
        "{{ m.role | upper }}",
    ),
    *("{% if m.content %}{{ m.content }}{% endif %}", "{% if m.content != '' %}a{% endif %}"),
    *(
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
        "{{ loop.index }}",
    ),
    "{% if m.content is mapping %}{% for p in m.content %}{{ p.text | upper }}{% endfor %}{% endif %}",
    "{% if 'tool_calls' in m and m.tool_calls is not none %}{{ m.content | upper }}{% else %}a{% endif %}",
    "{% if m.tool_calls is defined %}{{ m.content | upper }}{% endif %}",
    "{% if m.role == 'tool' or m.role == 'ipython' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}",
    "{% if tools %}{{ m.content | upper }}{% elif tools is none %}{{ m.content }}{% endif %}",
    "{% if tools is not none and m.content | length > 3 %}{{ m.content | upper }}{% endif %}",
    "{% macro f(a, b='x') %}{{ a ~ b }}{% endmacro %}{{ f(m.content) }}{{ f(m.content, b=m.role) }}",
    "{% set n = namespace(last=0) %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{{ n.last }}",
    "{% set n = namespace(m=none) %}{% set n.m = m %}{{ 'x' if m is sameas n.m }}{{ n.m.content }}",
    "{% for t in messages[1:] if t.role != 'system' %}{{ loop.index ~ t.content }}{% break %}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
    "{% set x = messages[0].content if messages[0].role == 'system' else 'none' %}{{ x if x else '' }}",
    "{{ raise_exception('no ' ~ m.content) if m.role == 'tool' }}",
]


def around(part: str) -> str:
    return "{% for m in messages %}" + part + "{% endfor %}"


@pytest.mark.parametrize("part", LOOKS)
def test_whatever_looks_is_not_proved(part: str) -> None:
    assert not only_writes(around(part), ROLES)
    assert not only_writes(
        around("{% if loop.first %}" + part + "{% else %}{{ m.content }}{% endif %}"), ROLES
    )


@pytest.mark.parametrize("part", WRITES)
def test_what_only_writes_is_proved(part: str) -> None:
    assert only_writes(around(part), ROLES)


def test_roles_decide_which_branches_are_taken() -> None:
    template = around("{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}")
    assert only_writes(template, ROLES)
    assert not only_writes(template, [*ROLES, "tool"])


def test_what_is_no_template_is_not_proved() -> None:
    assert not only_writes("{% for m in messages %}", ROLES)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
UNKNOWN = ("generation", "random", "lipsum")  # no two environments, or no two renderings, write the same
RUNNABLE = [part for part in (*LOOKS, *WRITES * 4) if not any(word in part for word in UNKNOWN)]
CONDITIONS = [
    "m.content",
    "m.role == 'user'",
    "loop.last",
    "x",
    "m.content is string",
    "'a' in m.content",
    "tools",
    "y",
]
SETS = [
    "{% set x = m.content %}",
    "{% set x = m.content | trim %}",
    "{% set y = messages[0].content ~ 'a' %}",
    "{% set x = m.role %}",
]


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Made of parts that look and parts that do not, in conditions and after assignments."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        part = draw(
            st.sampled_from(RUNNABLE)
            | st.sampled_from(["{{ x }}", "{{ y }}", "{{ x | upper }}", "{{ y.split('a') }}"])
        )
        if draw(st.booleans()):
            other = draw(st.sampled_from(["", "{{ m.content }}", "{{ x }}"]))
            part = (
                "{% if "
                + draw(st.sampled_from(CONDITIONS))
                + " %}"
                + part
                + "{% else %}"
                + other
                + "{% endif %}"
            )
        parts.append(draw(st.sampled_from(["", *SETS])) + part)
    return around("|".join(parts))


def written(template: str, words: list[str]) -> str | None:
    messages = [
        {"role": role, "content": said}
        for role, said in zip(("system", "user", "assistant"), words, strict=True)
    ]
    try:
        return ENVIRONMENT.from_string(template).render(messages=messages, tools=None, documents=None)
    except (TemplateError, TypeError, ValueError, KeyError):
        return None


@settings(max_examples=300)
@given(templates(), st.lists(st.sampled_from(["a", "x", "'q' \\ <é>", "aXa", "b a"]), min_size=3, max_size=3))
def test_what_is_proved_holds_for_any_words(template: str, words: list[str]) -> None:
    if not only_writes(template, ROLES):
        return
    stood = [str(message["content"]) for message in stand_ins(ROLES)]
    pattern = written(template, stood)
    found = written(template, words)
    assert (pattern is None) == (found is None)
    if pattern is None:
        return
    for stand_in, said in zip(stood, words, strict=True):
        pattern = pattern.replace(stand_in, said).replace(stand_in.strip(), said)
    assert found == pattern
