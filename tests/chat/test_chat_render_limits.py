"""A chat template that does not end, or writes without end, is one sentence at the start."""

import os
import signal
import time
from typing import Any

import pytest

from rally.chat import ChatCodec, render_limits, templates, tiny_tokenizer
from rally.chat.render_limits import TemplateTooCostly, check_rendering
from rally.chat.templates import TemplateError

GOOD = str(tiny_tokenizer().chat_template)
R = "range(99999)"
ENDLESS = {
    "a loop in a loop": f"{{% for i in {R} %}}{{% for j in {R} %}}{{% endfor %}}{{% endfor %}}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "one operation": "{{ messages and 9 ** (9 ** (8 + messages|length)) }}",
    "one operation while compiling": "{{ 9 ** (9 ** 9) }}",
    "only for tool answers": "{% if messages|length > 4 %}{% for i in " + R + " %}{% for j in " + R + " %}"
    "{% endfor %}{% endfor %}{% endif %}",
}
LARGE = {
    "text that doubles": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "a long text": "{{ 'x' * 20000000 }}",
    "a longer text": "{{ 'x' * 20000000000 }}",
    "a list": "{{ ([0] * 2000000000)|length }}",
}


def build(template: str) -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), chat_template=template + GOOD)


@pytest.mark.drill("reliability", "A chat template loops without end", "One sentence at the start")
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "SECONDS", 1.0)
    with pytest.raises(TemplateTooCostly, match=r"took more than 1 seconds to render a conversation of a few words"):
        build(template)


@pytest.mark.drill("reliability", "A chat template writes gigabytes", "One sentence at the start")
@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_that_writes_too_much_is_refused(template: str) -> None:
    with pytest.raises(TemplateTooCostly, match=r"wrote more than|needed more than|took more than"):
        build(template)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ range(10 ** 12) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_errors_of_every_kind_are_sentences(template: str) -> None:
    with pytest.raises(TemplateError, match="cannot render the roles user"):
        build(template)


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_tried", set())
    tried: list[Any] = []
    monkeypatch.setattr(templates, "check_rendering", tried.append)
    for _ in range(3):
        ChatCodec(tiny_tokenizer()).with_tools([{"name": "x", "parameters": {}}])
    assert len(tried) == 1


def test_the_trial_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_tried", set())
    started = time.monotonic()
    ChatCodec(tiny_tokenizer())
    assert time.monotonic() - started < render_limits.SECONDS / 2


def test_ctrl_c_during_the_fork_is_not_lost() -> None:
    """Python drops what is raised in the hooks of a fork, and that is where it handles a signal that came meanwhile."""
    pressed: list[int] = []
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT) if pressed else None)
    pressed.append(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            check_rendering(lambda: 1)
    finally:
        pressed.clear()
    check_rendering(lambda: 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
