"""Hostile chat templates: they reach nothing and end soon (CASES G08, G09); what honest templates use works."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
import tokenizers

from octavo.errors import TemplateError
from octavo.tokenizer import sandbox
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocab import Vocabulary


@pytest.fixture(scope="module")
def render():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = Tokenizer(Vocabulary(backend, "byte_level", 1, {}, special_tokens_map={"bos_token": "<s>"}))

    def run(source: str, content: str = "hi", **options) -> str:
        return ChatTemplate(source, tokenizer, time_limit=1.0).render([{"role": "user", "content": content}], **options)

    return run


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ ~ 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ messages|map(attribute='__class__')|first|string|length + 'x' }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ ~ 1 }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ messages[0].items.__self__ ~ 1 }}",
        "{{ '{0.__class__}'.format(1) ~ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ lipsum() }}",
        "{{ self.__init__ ~ 1 }}",
        "{{ x.y.z }}",
        "{{ 1 / 0 }}",
    ],
)
def test_nothing_inside_python_can_be_reached(render, source):
    with pytest.raises(TemplateError):
        render(source)


def test_not_even_to_print_it(render):
    for source in (
        "{{ cycler.__init__ }}",
        "{{ range.__self__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ raise_exception.__code__ }}",
    ):
        assert not _text_or_error(render, source)


def _text_or_error(render, source: str) -> str:
    try:
        return render(source)
    except TemplateError:
        return ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s]|join(ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x ~ '' }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 2 ** 10000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ strftime_now('%1000000000d') }}",
        "{% for i in range(90000) %}" + "x" * 20000 + "{% endfor %}",
        "{% set s %}{% for i in range(90000) %}" + "x" * 20000 + "{% endfor %}{% endset %}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "x" * (sandbox.MAX_TEMPLATE_CHARS + 1),
    ],
)  # fmt: skip
def test_bombs_end_with_an_error(render, source):
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{{", "{% for %}", "{% endfor %}", "{{ 1 | nosuch }}", "{% nosuch %}"])
def test_broken_templates_are_refused_when_read(render, source):
    with pytest.raises(TemplateError, match="cannot read"):
        render(source)


@pytest.mark.parametrize("source", [None, 5, b"x"])
def test_other_sources(source):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = Tokenizer(Vocabulary(backend, "byte_level", 1, {}))
    with pytest.raises(TemplateError):
        ChatTemplate(source, tokenizer).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ messages[0]['content'] }}", "<s>hi"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{{ m }}{% if loop.last %}!{{ loop.length }}{% endif %}{% endfor %}", "123!3"),
        ("{% for m in [1, 2, 3] %}{{ m }}{% break %}{% endfor %}", "1"),
        ("{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.previtem is defined }}{% endfor %}", "0False"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}", "a1None"),
        ("{% for x in nothing %}a{% else %}empty{% endfor %}", "empty"),
        ("{% for x in [[1], [2]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }}", "1-2"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ {'b': '<é&\\'>', 'a': [1, none, true]}|tojson }}", '{"b": "<é&\'>", "a": [1, null, true]}'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ ['a', 'b']|join(', ') }}{{ [{'n': 1}, {'n': 2}]|join('/', attribute='n') }}", "a, b1/2"),
        ("{{ 'a b'|replace(' ', '_')|upper }}{{ ' x '.strip() }}{{ 'a-b'.split('-')[-1] }}", "A_Bxb"),
        ("{{ 'a\\nb'|indent(2) }}{{ 'a\\nb'|indent(2, true) }}", "a\n  b  a\n  b"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ [3, 1]|sort|first }}", "11"),
        ("{{ '%s=%d' % ('a', 2) }}{{ '{}:{}'.format('a', 1) }}", "a=2a:1"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages[0].content is string }}{{ tools is none }}{{ zzz is defined }}", "TrueTrueFalse"),
        ("{%- for m in messages if m.role == 'user' -%} {{ m.content }} {%- endfor -%}", "hi"),
        ("{% set x %}{{ 1 }}b{% endset %}{{ x }}{{ 2 ** 3 }}{{ 7 // 2 }}{{ 7 % 4 }}", "1b833"),
        ("{% call(x) f() %}{{ x }}{% endcall %}{% macro f() %}{{ caller(5) }}{% endmacro %}", None),
    ],
)  # fmt: skip
def test_what_honest_templates_use(render, source, expected):
    if expected is None:
        with pytest.raises(TemplateError):  # a macro is used before it is defined
            render(source)
    else:
        assert render(source) == expected


def test_dates_and_own_errors(render):
    assert re.fullmatch(r"\d\d \w{3} \d{4}", render("{{ strftime_now('%d %b %Y') }}")) and str(datetime.now().year)[:2] in render(
        "{{ strftime_now('%Y') }}"
    )
    with pytest.raises(TemplateError, match="only two words"):
        render("{{ raise_exception('only two\nwords') }}")


def test_long_honest_conversations_fit(render):
    source = "{% for i in range(2000) %}{{ '<|user|>' + messages[0].content + '</s>' }}\n{% endfor %}"
    assert len(render(source, "x" * 2000)) > 4_000_000
