import pytest

from agentenv.template import journal as journals
from agentenv.template.journal import MAX_LINE, Journal, Lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "build.log"


def test_entries_are_read_by_position_and_level(path):
    journal = Journal(path)
    for number in range(250):
        journal.add("debug" if number % 2 else "info", f"line {number}", str(number % 3))
    assert [e.message for e in journal.page(0)][:2] == ["line 0", "line 1"]
    assert len(journal.page(0)) == len(journal.page(100)) == 100 and len(journal.page(200)) == 50
    assert journal.page(250) == [] and journal.page(10_000) == []
    assert [e.message for e in journal.page(1, limit=2, level="info")] == ["line 2", "line 4"]
    assert [e.message for e in journal.last("0", 2)] == ["line 246", "line 249"]


def test_a_later_server_reads_what_is_whole(path):
    journal = Journal(path)
    journal.add("error", "ünd \ud800\x00", "finalize")
    journal.add("info", "second")
    journal.close()
    with path.open("a") as file:
        file.write('{"time": "2026-01')
    found = Journal.read(path).page()
    assert [(e.level, e.step) for e in found] == [("error", "finalize"), ("info", None)]
    assert found[1] == journal.page()[1]
    assert Journal.read(path.with_name("none")).page() == []


def test_a_log_is_bounded(path, monkeypatch):
    monkeypatch.setattr(journals, "MAX_ENTRIES", 3)
    journal = Journal(path)
    for _ in range(10):
        journal.add("info", "x" * (2 * MAX_LINE))
    entries = journal.page()
    assert len(entries) == 4 and entries[-1].level == "warn"
    assert all(len(entry.message) <= MAX_LINE for entry in entries)


def test_output_is_put_together_to_lines():
    lines = Lines()
    assert lines.feed("stdout", b"one\ntw") == ["one"]
    assert lines.feed("stderr", b"error\n") == ["error"]
    assert lines.feed("stdout", "o\r\n10%\r20%\n\u00fc".encode()[:-1]) == ["two", "20%"]
    assert lines.end() == [("stdout", "\ufffd")] and lines.end() == []
    assert lines.feed("stdout", b"x" * (MAX_LINE + 1)) == ["x" * (MAX_LINE + 1)]
