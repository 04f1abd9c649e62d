"""Chat templates: what they are given, and what a hostile or broken one may not do."""

import datetime
import re
import time

import pytest
from hostile_templates import HARMLESS, REFUSED
from tokenizers import Tokenizer, models

from lowering.source import open_model
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
# Each with what templates of its family do: not theirs, but as they are written
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_3_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""
LINES_LIKE = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
<|system|>
None{{ eos_token }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
    {% else %}
<|{{ message['role'] }}|>
{{ message.content }}{{ eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}
"""
TEMPLATES = {
    "chatml": CHAT_ML,
    "blocks": WITH_BLOCKS,
    "qwen-like": QWEN_LIKE,
    "llama-3-like": LLAMA_3_LIKE,
    "mistral-like": MISTRAL_LIKE,
    "lines-like": LINES_LIKE,
}
ASK = [{"role": "user", "content": 'Is 1 < 2 & "ü" so?'}]
TOLD = [{"role": "system", "content": " Be brief. "}, *ASK]
TURNS = [
    *TOLD,
    {"role": "assistant", "content": " Yes:\n\n  {{ 1 < 2 }} 🦊\n"},
    {"role": "user", "content": "\tWhy?\n"},
]
CONVERSATIONS = {"user": ASK, "system": TOLD, "turns": TURNS}


def render(template: str, messages: list[dict[str, str]] = ASK) -> str:
    return render_chat(template, messages, "<s>", "</s>")


def reason_of(template: str, messages: list[dict[str, str]] = ASK) -> str:
    with pytest.raises(InputError, match="chat template failed") as caught:
        render(template, messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def as_transformers(template: str, messages: list[dict[str, str]]) -> str:
    """What ``apply_chat_template(..., add_generation_prompt=True)`` renders."""
    peer = pytest.importorskip("transformers")
    tokenizer = peer.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(
    template: str, messages: list[dict[str, str]]
) -> None:
    rendered = render(template, messages)
    assert rendered == as_transformers(template, messages)
    assert messages[-1]["content"].strip()[:4] in rendered


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_bundled_models_template_renders_as_in_transformers(
    messages: list[dict[str, str]],
) -> None:
    try:
        template = open_model("smollm2-135m").spec.tokenizer.chat_template
    except InputError as error:
        pytest.skip(str(error))
    assert template is not None
    assert render(template, messages) == as_transformers(template, messages)


def test_roles_that_a_template_refuses_are_refused_with_its_words() -> None:
    assert "roles must alternate" in reason_of(MISTRAL_LIKE, [*ASK, *ASK])


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
