from __future__ import annotations

import pytest

from diptych.server.chat_template import ChatTemplate
from diptych.server.errors import BadRequest
from diptych.server.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What <is> & 'that' 世?"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
]


@pytest.fixture
def template(tokenizer: Tokenizer) -> ChatTemplate:
    assert tokenizer.chat_template
    return ChatTemplate(tokenizer.chat_template, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})


def test_prompts_equal_those_of_transformers(template: ChatTemplate, model_dir):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_dir)
    for messages in CONVERSATIONS:
        for generation in (True, False):
            expected = reference.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
            assert template.render(messages, add_generation_prompt=generation) == expected


TOOLS_AND_CALLS = """{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}
{% endfor %}"""


def test_tools_are_shown_as_transformers_shows_them(model_dir):
    from transformers import AutoTokenizer

    called = {"name": "now", "arguments": {"place": "<Zürich> & 世", "n": [1.5, None]}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]},
        {"role": "tool", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    reference = AutoTokenizer.from_pretrained(model_dir)
    for shown in (tools, None):
        expected = reference.apply_chat_template(
            messages, tools=shown, chat_template=TOOLS_AND_CALLS, tokenize=False
        )
        template = ChatTemplate(TOOLS_AND_CALLS, {})
        assert template.render(messages, tools=shown, add_generation_prompt=False) == expected


def test_the_last_message_can_be_continued(template: ChatTemplate):
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two,"}]
    text = template.render(messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOne, two,")


def test_a_template_can_refuse_and_the_client_is_told_why():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        template.render([{"role": "user", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_template_error_is_the_requests_fault_not_a_crash():
    template = ChatTemplate("{{ messages[3].content + 1 }}", {})
    with pytest.raises(BadRequest):
        template.render([{"role": "user", "content": "x"}])


def test_templates_run_in_a_sandbox():
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(BadRequest, match="unsafe"):
        template.render([{"role": "user", "content": "x"}])


def test_template_arguments_and_helpers_work():
    template = ChatTemplate(
        "{% generation %}{{ flag }}{% endgeneration %}{{ messages | tojson }}{{ strftime_now('%Y')|length }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}",
        {},
    )
    assert template.render([{"role": "user", "content": "<é>"}], extra={"flag": "F"}) == (
        'F[{"role": "user", "content": "<é>"}]4'
    )
