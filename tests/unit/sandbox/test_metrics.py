from hypothesis import given
from hypothesis import strategies as st

from agentenv.sandbox.metrics import (
    INTERVAL,
    RING,
    SLOT,
    Sample,
    cpu_percent,
    decode,
    encode,
    place,
)

SAMPLE = Sample(1_700_000_000.5, 33.25, 4, 1, 2, 3, 1 << 40, 1 << 50)


def test_a_sample_comes_back():
    assert list(decode(encode(SAMPLE))) == [SAMPLE]


def test_empty_slots_and_a_torn_end_are_no_samples():
    assert list(decode(bytes(SLOT.size) + encode(SAMPLE) + b"torn")) == [SAMPLE]


@given(st.floats(0, 4e9), st.integers(0, RING - 1))
def test_an_hour_of_samples_has_a_slot_each(start, steps):
    first = Sample(start, 0, 1, 0, 0, 0, 0, 0)
    later = Sample(start + steps * INTERVAL, 0, 1, 0, 0, 0, 0, 0)
    assert 0 <= place(first) < RING * SLOT.size and place(first) % SLOT.size == 0
    intervals = later.time // INTERVAL - first.time // INTERVAL
    assert (place(first) == place(later)) == (intervals % RING == 0)


def test_shares():
    assert cpu_percent(1, 10, 1) == 10 and cpu_percent(1, 10, 2) == 5
    assert (
        cpu_percent(11, 10, 1) == 100 and cpu_percent(-1, 10, 1) == 0 and cpu_percent(1, 0, 1) == 0
    )
