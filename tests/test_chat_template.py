"""Chat templates: what they are given, and what a hostile or broken one may not do."""

import datetime
import re
import time

import pytest
from hostile_templates import HARMLESS, REFUSED

from profiles.errors import InputError
from runtime import chat_template, template_limits
from runtime.chat_template import MAX_TEMPLATE_CHARS, render_chat

CHAT_ML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITH_BLOCKS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if tools is not none %}
{{ tools | tojson(indent=4) }}
{%- endif %}
{{- "[" + system + "]" }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
    {% endif %}
{% generation %}{{ message | tojson }}{% endgeneration %}
{{ eos_token }}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(total=0) %}
{% for i in range(3) %}{% set ns.total = ns.total + i %}{% endfor %}
{{ '=' * ns.total }}
"""
ASK = [{"role": "user", "content": 'Is 1 < 2 & "ü" so?'}]
TOLD = [{"role": "system", "content": " Be brief. "}, *ASK]


def render(template: str, messages: list[dict[str, str]] = ASK) -> str:
    return render_chat(template, messages, "<s>", "</s>")


def reason_of(template: str, messages: list[dict[str, str]] = ASK) -> str:
    with pytest.raises(InputError, match="chat template failed") as caught:
        render(template, messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("messages", [ASK, TOLD], ids=["user", "system"])
@pytest.mark.parametrize("template", [CHAT_ML, WITH_BLOCKS], ids=["chatml", "blocks"])
def test_a_template_renders_as_in_transformers(
    template: str, messages: list[dict[str, str]]
) -> None:
    peer = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = peer.render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert [render(template, messages)] == expected


def test_a_template_can_ask_for_the_date() -> None:
    year = render("{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.date.today().year) <= 1


def test_a_template_raises_with_its_own_words() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem!') }}{% endif %}"
    )
    assert render(template) == ""
    assert "no system!" in reason_of(template, TOLD)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% include '/etc/passwd' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
    ids=["syntax", "type", "undefined", "division", "nesting", "include", "recursion"],
)
def test_a_broken_template_is_an_input_error(template: str) -> None:
    reason_of(template)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_template_is_refused_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    start = time.process_time()
    reason_of(REFUSED[name])
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_hostile_and_is_harmless_tells_nothing(name: str) -> None:
    text = render(HARMLESS[name])
    assert not re.search(r"__|<class|<function|<module|Context", text)
    assert len(text) < 100_000


def test_a_template_that_works_slowly_is_stopped() -> None:
    template = "{% set s = 'a' * 4000000 %}{% for i in range(90000) %}{% if 'b' in s %}{% endif %}"
    start = time.process_time()
    assert f"{template_limits.MAX_SECONDS:g} s" in reason_of(template + "{% endfor %}")
    assert time.process_time() - start < 8


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 500}
        for i in range(800)
    ]
    assert len(render(CHAT_ML, messages)) > 2_000_000


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    assert "unsafe" in reason_of(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100001) %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 10 ** 10000000000 }}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    ],
    ids=["loop", "nested-loops", "text", "list", "power", "output"],
)
def test_a_template_that_takes_too_much_is_stopped(template: str) -> None:
    start = time.process_time()
    reason_of(template)
    assert time.process_time() - start < 5


def test_the_length_of_a_template_is_limited() -> None:
    assert render("x" * MAX_TEMPLATE_CHARS)
    with pytest.raises(InputError, match=f"at most {MAX_TEMPLATE_CHARS}"):
        render("x" * (MAX_TEMPLATE_CHARS + 1))


def test_the_length_of_the_text_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 10)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert render(template, [{"role": "user", "content": "x" * 10}]) == "x" * 10
    assert "10 characters" in reason_of(template, [{"role": "user", "content": "x" * 11}])


def test_a_long_reason_is_cut() -> None:
    assert len(reason_of("{{ raise_exception('very ' * 1000) }}")) < 400


def test_renderings_do_not_share_their_budget() -> None:
    template = "{% for i in range(60000) %}{% endfor %}."
    assert render(template) == render(template) == "."
