"""Chat templates, as transformers renders them."""

from datetime import datetime

import pytest

from engine.wire.errors import InvalidRequestError, StartupError
from orchestrator.llm.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<hé>"}]


def test_special_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == "<s><hé>>"


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = "{% for m in [1, 2, 3] %}\n    {% if m == 2 %}{% break %}{% endif %}\n{{ m }}\n{% endfor %}"
    assert ChatTemplate(source, {}).render(MESSAGES) == "1\n"


def test_tojson_escapes_neither_html_nor_unicode() -> None:
    assert ChatTemplate("{{ messages[0]['content'] | tojson }}", {}).render(MESSAGES) == '"<hé>"'


def test_strftime_now_formats_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES) == str(datetime.now().year)


def test_generation_blocks_render_their_body() -> None:
    assert ChatTemplate("{% generation %}x{% endgeneration %}y", {}).render(MESSAGES) == "xy"


def test_a_refusal_of_the_template_is_the_callers_fault_and_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.field == "messages"


def test_a_template_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(MESSAGES)


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% for %}", {})
