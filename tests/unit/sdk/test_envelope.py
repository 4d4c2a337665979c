import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import GuestError
from agentenv.sdk.envelope import Decoder, encode

messages = st.lists(
    st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=5
)


@given(messages, st.integers(1, 50))
def test_messages_survive_any_cut(sent, size):
    data = b"".join(encode(message) for message in sent)
    decoder = Decoder()
    got = [m for i in range(0, len(data), size) for m in decoder.feed(data[i : i + size])]
    assert got == [(0, message) for message in sent]


@given(st.binary(max_size=64))
def test_garbage_is_an_error_or_nothing(data):
    try:
        list(Decoder().feed(data))
    except GuestError as error:
        assert error.code == "guest_protocol"


def test_an_oversized_message_is_refused_before_it_is_kept():
    with pytest.raises(GuestError):
        list(Decoder().feed(b"\0\xff\xff\xff\xff"))
