import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import UserError
from agentenv.sandbox import network
from agentenv.sandbox.network import (
    Plan,
    Policy,
    host_mask,
    host_rules,
    ranges,
    slot_rules,
    slots_in,
)

INNER, UPLINK = ipaddress.IPv4Network("10.233.0.0/30"), ipaddress.IPv4Network("10.234.0.0/16")


def plan(index=5):
    return Plan("0a1b2c3d", index, INNER, UPLINK)


def test_addresses_of_a_slot():
    p = plan()
    assert (p.gateway, p.guest, p.guest_cidr) == ("10.233.0.1", "10.233.0.2", "10.233.0.2/30")
    assert (p.host_side, p.slot_side) == ("10.234.0.10", "10.234.0.11")


@given(st.integers(0, slots_in(UPLINK) - 1), st.integers(0, slots_in(UPLINK) - 1))
def test_no_two_slots_share_an_address_or_a_name(one, other):
    a, b = plan(one), plan(other)
    assert len(a.host_interface) <= network.MAX_INTERFACE_NAME
    if one != other:
        assert not {a.host_side, a.slot_side} & {b.host_side, b.slot_side}
        assert a.host_interface != b.host_interface


def test_metadata_stays_closed_whatever_is_allowed():
    rules = slot_rules(plan(), Policy(), allow_private=("169.254.0.0/16", "10.1.0.0/16"))
    assert "ip daddr { 10.1.0.0/16 } accept" in opened(rules)
    assert "169.254.0.0/16" in egress(rules).partition("goto open")[0]
    assert "169.254.0.0/16 } accept" not in rules
    assert "169.254.0.0/16 } accept" not in host_rules("t", UPLINK, ("169.254.0.0/16",))


def egress(rules):
    """The chain that every packet of the guest meets first."""
    return rules.split("chain egress {")[1].split("\n  }")[0]


def opened(rules):
    """The chain for what the sandbox's own policy lets out."""
    return rules.split("chain open {")[1].split("\n  }")[0]


def test_without_internet_nothing_is_accepted_outwards():
    rules = slot_rules(plan(), Policy(internet=False), allow_private=("10.1.0.0/16",))
    assert "accept" not in egress(rules) and "open" not in egress(rules)


def test_the_hosts_own_addresses_are_denied_before_anything_is_allowed():
    rules = slot_rules(plan(), Policy(), allow_private=("10.0.0.0/8",), host=("203.0.113.1",))
    assert "{ 203.0.113.1/32 } drop" in egress(rules).partition("goto open")[0]
    assert "10.0.0.0/8 } accept" in opened(rules)


def test_what_the_sandbox_allows_wins_over_what_it_denies_and_never_over_the_node():
    policy = Policy(allow_out=("8.8.8.8/32", "10.0.0.0/8"), deny_out=("0.0.0.0/0",))
    lines = [
        line.strip() for line in egress(slot_rules(plan(), policy, allow_private=())).split("\n")
    ]
    allow = lines.index("ip daddr { 8.8.8.8/32, 10.0.0.0/8 } goto open")
    assert lines.index("ip daddr { 0.0.0.0/0 } drop") > allow > 0
    assert lines[1].startswith("ip daddr { 127.0.0.0/8, 169.254.0.0/16")
    rest = opened(slot_rules(plan(), policy, allow_private=()))
    assert rest.index("10.0.0.0/8") < rest.index("accept")
    assert not policy.resolves and Policy(deny_out=("1.0.0.0/8",)).resolves


def test_ranges_overlap_in_no_set():
    policy = Policy(deny_out=("10.1.0.0/16", "10.0.0.0/8", "10.1.2.3/32"))
    assert "ip daddr { 10.0.0.0/8 } drop" in egress(slot_rules(plan(), policy, allow_private=()))


def test_ranges_are_read_and_what_is_none_is_refused_by_name():
    assert ranges("allowOut", ["8.8.8.8", "10.1.2.3/8", "8.8.8.8/32"]) == (
        "8.8.8.8/32",
        "10.0.0.0/8",
    )
    for text, code in (
        ("example.org", "not_supported"), ("*.example.org", "not_supported"),
        ("1.2.3", "invalid_request"), ("::1", "invalid_request"), ("", "invalid_request"),
        ("1.2.3.4/33", "invalid_request"), ("8.8.8.8 } accept", "invalid_request"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="denyOut") as raised:
            ranges("denyOut", [text])
        assert raised.value.code == code, text


@given(st.text(max_size=40))
def test_no_text_gets_into_the_rules(text):
    try:
        (found,) = ranges("allowOut", [text])
    except UserError:
        return
    ipaddress.IPv4Network(found)


def test_a_mask_is_a_host():
    assert host_mask("localhost:${PORT}") == "localhost:${PORT}"
    for bad in ("", "a b", "a\r\nX: y", "${HOME}", "x" * 300):
        with pytest.raises(UserError, match="maskRequestHost"):
            host_mask(bad)
