"""Chat templates: rendered as their authors expect, in a sandbox, with their own words when they object."""

from __future__ import annotations

from datetime import datetime

import pytest

from cluster.language.chat_template import ChatTemplate
from planner.errors import InvalidCheckpoint, InvalidRequest

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render([USER], **options)  # type: ignore[arg-type]


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n    {% if m %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}") == "hi\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}", '{"a": 1, "b": "<é>"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}{% set x = 1 %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
        ("{{ not_given is defined }}", "False"),
    ],
)
def test_templates_find_what_they_are_written_against(source: str, expected: str) -> None:
    assert render(source) == expected


def test_templates_may_tell_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year + 1)}


def test_a_templates_objection_is_told_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[5].content.x }}", "{{ 1 / 0 }}"])
def test_a_template_that_stumbles_over_messages_refuses_them(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_its_input(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_a_template_that_does_not_compile_is_a_bad_checkpoint() -> None:
    with pytest.raises(InvalidCheckpoint, match="compile"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", "  spaced  ", "hi", "", "<|im_end|>"])
def test_a_continued_message_ends_where_its_content_ends(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + content.lstrip()


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="last message"):
        template.render(
            [USER, {"role": "assistant", "content": "x"}], add_generation_prompt=False, continue_final_message=True
        )


def test_an_option_that_the_template_never_reads_is_refused() -> None:
    template = ChatTemplate("{% if enable_thinking %}think{% endif %}{{ messages[0].content }}")
    assert template.render([USER], options={"enable_thinking": True}) == "thinkhi"
    for name in ("thinking", "messages", "bos_token"):
        with pytest.raises(InvalidRequest, match=name):
            template.render([USER], options={name: 1})
