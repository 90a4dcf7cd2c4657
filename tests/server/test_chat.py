"""Chat templates: rendering, roles, files of a folder, and templates that fail or want too much."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("orjson")

from ortolan.errors import ModelError
from ortolan.server.chat import ChatTemplate, read_chat_template, read_template_file
from ortolan.server.errors import ApiError

CHATML = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HELLO = [{"role": "user", "content": "Hé <b>"}]


def render(source, messages=HELLO, **options):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options)


def test_messages_become_a_prompt():
    assert render(CHATML) == "<|im_start|>user\nHé <b><|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHé <b><|im_end|>\n"


def test_tools_are_json_without_escapes_for_html():
    tool = {"type": "function", "function": {"name": "é", "description": "a < b"}}
    assert json.dumps(tool, ensure_ascii=False) in render(CHATML, tools=[tool])


def test_what_transformers_gives_to_templates():
    assert render("{{ bos_token }}{% for m in messages %}{% break %}{% endfor %}") == "<s>"
    assert render("{% generation %}a{% endgeneration %}{{ not documents }}") == "aTrue"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert render("{{ thinking }}", variables={"thinking": False}) == "False"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_variables_do_not_replace_messages():
    assert render("{{ messages | length }}", variables={"messages": []}) == "1"


def test_the_role_developer_is_named_as_the_template_knows_it():
    message = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{# developer #}{{ messages[0].role }}", message) == "developer"
    assert message[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only user') }}", "refuses them: only user"),
        ("{{ messages[3].content }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaa{% endfor %}{% endfor %}", "more than"),
        ("{{ 'a' * 10 ** 9 }}", "too l"),
        ("{{ 9 ** 9999999 }}", "too large"),
        ("{{ [0, 1, 2] * 999999 }}", "too long"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(source, reason):
    with pytest.raises(ApiError, match=reason) as refused:
        render(source)
    assert refused.value.status == 400


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% unknown %}", "(" * 10])
def test_a_template_that_is_not_jinja(source):
    if source[0] == "(":
        assert render(source) == source
    else:
        with pytest.raises(ModelError, match="not valid Jinja: line 1: "):
            render(source)


def test_a_file_replaces_the_templates_of_a_folder(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "chat_template": [{"name": "x", "template": "a"}]})
    write(tmp_path, "own.jinja", "{{ bos_token }}{{ messages[0].content }}")
    assert read_chat_template(tmp_path, tmp_path / "own.jinja").render(HELLO) == "<s>Hé <b>"
    write(tmp_path, "own.jinja", "{{ bos_token }}\n\n{% if %}")
    with pytest.raises(ModelError, match=r"own\.jinja' is not valid Jinja: line 3: "):
        read_template_file(tmp_path / "own.jinja")
    with pytest.raises(ModelError, match=r"missing\.jinja' cannot be read: .*No such file"):
        read_template_file(tmp_path / "missing.jinja")


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_folder_without_a_template(tmp_path):
    assert read_chat_template(tmp_path) is None


def test_the_files_of_a_folder(tmp_path):
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "image_token": "<i>"}
    write(tmp_path, "tokenizer_config.json", {**tokens, "chat_template": "{{ bos_token + eos_token + image_token }}"})
    assert read_chat_template(tmp_path).render(HELLO) == "<s></s><i>"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert read_chat_template(tmp_path).render(HELLO) == "json"
    write(tmp_path, "chat_template.jinja", "jinja")
    assert read_chat_template(tmp_path).render(HELLO, tools=[{}]) == "jinja"
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools {{ tools | length }}")
    template = read_chat_template(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=[{}])) == ("jinja", "tools 1")
    assert template.takes_tools


def test_templates_in_a_list(tmp_path):
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": listed})
    template = read_chat_template(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=[{}])) == ("a", "b")


@pytest.mark.parametrize("found", [3, [3], [{"name": "default"}], [{"name": "rag", "template": ""}]])
def test_malformed_templates(tmp_path, found):
    write(tmp_path, "tokenizer_config.json", {"chat_template": found})
    with pytest.raises(ModelError, match=r"chat.template"):
        read_chat_template(tmp_path)
