"""Kernels' messages as E2B's events (E2B.md §5)."""

import time

import pytest

from agentenv.template.shipped.interpreter.messages import end, error, event_of


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_has_a_time_in_nanoseconds(name):
    before = time.time_ns()
    event = event_of("stream", {"name": name, "text": "x\n"})
    assert before <= event.pop("timestamp") <= time.time_ns()
    assert event == {"type": name, "text": "x\n"}


def test_the_result_of_a_cell_is_the_main_one():
    content = {"data": {"text/plain": "1", "text/html": "<b>1</b>"}, "metadata": {}}
    wanted = {"type": "result", "text": "1", "html": "<b>1</b>"}
    assert event_of("execute_result", content) == {**wanted, "is_main_result": True}
    assert event_of("display_data", content) == {**wanted, "is_main_result": False}


def test_every_format_has_its_field_and_the_others_are_extra():
    data = {
        "text/markdown": "m", "image/svg+xml": "s", "image/png": "p", "image/jpeg": "j",
        "application/pdf": "d", "text/latex": "l", "application/json": [1, 2],
        "application/javascript": "a", "application/geo+json": {"x": 1},
    }  # fmt: skip
    assert event_of("display_data", {"data": data}) == {
        "type": "result", "markdown": "m", "svg": "s", "png": "p", "jpeg": "j", "pdf": "d",
        "latex": "l", "json": [1, 2], "javascript": "a",
        "extra": {"application/geo+json": {"x": 1}}, "is_main_result": False,
    }  # fmt: skip


def test_text_may_come_as_lines():
    assert event_of("display_data", {"data": {"text/html": ["a\n", "b"]}})["html"] == "a\nb"


@pytest.mark.parametrize(
    ("shown", "text"),
    [("'abc'", "abc"), ('"a\'b"', "a'b"), ("''", ""), ("'", "'"), ("('a',)", "('a',)"), ("a", "a")],
)
def test_a_string_is_shown_as_what_it_holds(shown, text):
    assert event_of("execute_result", {"data": {"text/plain": shown}})["text"] == text


def test_errors_come_without_colours():
    content = {"ename": "E", "evalue": "v", "traceback": ["\x1b[0;31mE\x1b[0m", "at 1"]}
    assert event_of("error", content) == error("E", "v", "E\nat 1")
    assert event_of("error", {**content, "ename": ""})["name"] == "Error"


def test_the_rest():
    count = event_of("execute_input", {"execution_count": 3, "code": "x"})
    assert count == {"type": "number_of_executions", "execution_count": 3}
    assert event_of("status", {"execution_state": "busy"}) is None
    assert end() == {"type": "end_of_execution"}
