from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.api.paging import page, parse_metadata, parse_states, parse_token, token
from agentenv.errors import UserError
from agentenv.model import Guest, Resources
from agentenv.sandbox.record import SandboxInfo
from agentenv.sandbox.state import State

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def info(number: int, **more) -> SandboxInfo:
    started = NOW + timedelta(microseconds=number // 2)  # pairs start at the same instant
    return SandboxInfo(
        f"s{number:03}", State.RUNNING, "tpl", "b", "i", started, started, Resources(1), Guest(), **more
    )  # fmt: skip


@given(st.integers(0, 30), st.integers(1, 9), st.booleans())
def test_pages_cover_everything_once_in_order(count, limit, ascending):
    everything = [info(n) for n in range(count)]
    seen, next_token = [], None
    while True:
        part, next_token = page(
            everything, metadata={}, limit=limit, next_token=next_token, ascending=ascending
        )
        seen += part
        assert len(part) <= limit
        if next_token is None:
            break
    assert seen == sorted(everything, key=lambda i: (i.started_at, i.id), reverse=not ascending)


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_metadata_comes_back_from_the_sdks_encoding(pairs):
    pairs = {
        k.encode("utf-8", "replace").decode(): v.encode("utf-8", "replace").decode()
        for k, v in pairs.items()
    }
    as_sent = urlencode({quote(k): quote(v) for k, v in pairs.items()})
    assert parse_metadata(as_sent) == pairs


def test_filters_are_and_ed():
    a, b = info(1, metadata={"x": "1", "y": "2"}, alias="base"), info(2, metadata={"x": "1"})

    def ids(**query):
        return [i.id for i in page([a, b], **{"metadata": {}, **query})[0]]

    assert ids(metadata={"x": "1"}) == [b.id, a.id]
    assert ids(metadata={"x": "1", "y": "2"}) == [a.id]
    assert ids(template="base") == [a.id] and ids(template="tpl") == [b.id, a.id]
    assert ids(started_after=b.started_at) == [b.id]
    assert ids(started_after=b.started_at.replace(tzinfo=None)) == [b.id]


@given(st.text(max_size=60))
def test_a_foreign_token_is_refused_or_parsed_never_a_crash(text):
    try:
        parse_token(text)
    except UserError as error:
        assert error.code == "invalid_token"


def test_a_token_names_its_sandbox():
    assert parse_token(token((info(5).started_at, "s005"))) == (info(5).started_at, "s005")


def test_states():
    assert parse_states(None) == {"running", "paused"} and parse_states("paused") == {"paused"}
    with pytest.raises(UserError):
        parse_states("running,dead")
