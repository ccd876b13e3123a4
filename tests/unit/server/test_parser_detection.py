"""What chat templates say of tool calls and thinking, and what an engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.server.reading import made, read

from diptych.common_config.namespaces import LEAVES
from diptych.engine.wire import Finish, SamplingParams, TokenOutput
from diptych.server.chat_template import ChatTemplate
from diptych.server.message_parser import MessageParser
from diptych.server.reasoning import REASONING_FORMATS, ReasoningSplitter, detect_reasoning
from diptych.server.sample import Sample, SampleSpec
from diptych.server.sampling_options import TextOptions
from diptych.server.tokenizer import Tokenizer
from diptych.server.tools.mistral import MistralParser
from diptych.server.tools.registry import TOOL_PARSERS, detect_tool_parser

QWEN = """{%- if tools %}<|im_start|>system
For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA_31 = """{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% endif %}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{%- if builtin_tools is defined %}<|python_tag|>{% endif %}{{ message.content }}<|eot_id|>{% endfor %}"""

MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for message in messages %}{% if message.tool_calls is defined %}[TOOL_CALLS]
{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}{% endfor %}"""

PYTHONIC = """{% if tools is not none %}You MUST put it in the format of
[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]
{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"""

QWEN_CODER = "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\n{% endif %}"

R1 = """{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% else %}
<｜Assistant｜>{{ message.content.split('</think>')[-1] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "calls", "thinking"),
    [
        (QWEN, "hermes", "qwen3"),
        (LLAMA_31, "llama3_json", None),
        (LLAMA_31.replace("<|python_tag|>", ""), "llama3_json", None),
        (MISTRAL, "mistral", None),
        (MISTRAL + "[THINK]{{ x }}[/THINK]", "mistral", "mistral"),
        (PYTHONIC, "pythonic", None),
        (QWEN_CODER, None, None),
        (R1, None, "deepseek_r1"),
        (PLAIN, None, None),
        ("", None, None),
    ],
)
def test_a_template_shows_its_formats(template: str, calls: str | None, thinking: str | None) -> None:
    assert (detect_tool_parser(template), detect_reasoning(template)) == (calls, thinking)


def test_the_settings_accept_every_parser_there_is() -> None:
    assert set(LEAVES["tool_call_parser"].choices) == {"auto", "none", *TOOL_PARSERS}
    assert set(LEAVES["reasoning_parser"].choices) == {"auto", "none", *REASONING_FORMATS}


def test_a_template_knows_whether_it_shows_tools() -> None:
    assert all(ChatTemplate(source, {}).shows_tools for source in (QWEN, LLAMA_31, MISTRAL, PYTHONIC))
    assert not ChatTemplate(PLAIN, {}).shows_tools
    assert ChatTemplate("{{ reasoning_effort }}", {}).knows_effort
    text = ChatTemplate(MISTRAL, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "Hi"}], tools=[{"type": "function"}]
    )
    assert '[AVAILABLE_TOOLS][{"type": "function"}]' in text


@pytest.mark.parametrize(
    ("kwargs", "text", "reasoning"),
    [
        ({}, "<think>hm</think>Yes", "hm"),
        ({"enable_thinking": False}, "Yes", ""),
    ],
)
def test_the_rendered_prompt_decides_how_an_answer_is_read(
    kwargs: dict[str, object], text: str, reasoning: str
) -> None:
    for template, family in ((QWEN, "qwen3"), (QWEN, "deepseek_r1")):
        prompt = ChatTemplate(template, {}).render([{"role": "user", "content": "Hi"}], extra=kwargs)
        form = REASONING_FORMATS[family]
        message = read(ReasoningSplitter(form, form.at_the_end_of(prompt)), [text])
        assert (message.reasoning, message.content) == (reasoning, "Yes")


def test_a_template_that_opens_the_thought_starts_inside_it() -> None:
    prompt = ChatTemplate(R1, {}).render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<think>\n")
    for name in ("deepseek_r1", "qwen3"):
        assert REASONING_FORMATS[name].at_the_end_of(prompt).name == "BEGUN"


# ---- special tokens ---------------------------------------------------------------------------------


@pytest.fixture
def marked(model_dir: Path, tmp_path: Path) -> Tokenizer:
    """A tokenizer two of whose special tokens are Mistral's markers."""
    source = json.loads((model_dir / "tokenizer.json").read_text())
    names = {}
    special = [token for token in source["added_tokens"] if token["special"]]
    for token, name in zip(special[-2:], ("[TOOL_CALLS]", "[ARGS]"), strict=True):
        names[token["content"]] = name
        token["content"] = name
    vocabulary = source["model"]["vocab"]
    source["model"]["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    return Tokenizer(tmp_path)


def test_markers_that_are_special_tokens_reach_the_parser(marked: Tokenizer) -> None:
    text = 'Well.[TOOL_CALLS]f[ARGS]{"a": "é"}'
    ids = marked.encode(text, add_special_tokens=False)
    assert marked.decode(ids, skip_special_tokens=True) == 'Well.f{"a": "é"}'

    def answer(**options: object) -> str:
        spec = SampleSpec(
            index=0,
            prompt_index=0,
            prompt_ids=[1, 2],
            sampling=SamplingParams(max_new_tokens=100, seed=0),
            text=TextOptions(**options),
            rid="r",
        )
        sample = Sample(spec, "w", marked, match_stops=True)
        for token_id in [0, *ids]:
            sample.absorb(TokenOutput(rid="w", token_ids=[token_id]))
        sample.absorb(TokenOutput(rid="w", token_ids=[2], finish=Finish(kind="stop", matched=2)))
        return sample.take().text

    assert answer() == 'Well.f{"a": "é"}'
    shown = answer(shown_special=frozenset(MistralParser.markers))
    assert shown == text
    message = read(MessageParser(tools=MistralParser({"f"})), [shown])
    assert (message.content, made(message)) == ("Well.", [("f", '{"a": "é"}')])


# ---- where templates are ----------------------------------------------------------------------------


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    return tmp_path


def test_a_model_may_have_another_template_for_tools(folder: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == (PLAIN, QWEN)
    template = ChatTemplate(PLAIN, {}, tool_source=QWEN)
    assert template.shows_tools
    assert detect_tool_parser(template.source) == "hermes"
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages) == "<|im_start|>user\nHi<|im_end|>"
    assert "For each function call" in template.render(messages, tools=[{"type": "function"}])


def test_templates_in_files_come_first(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert Tokenizer(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    tokenizer = Tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("new", "for tools")
