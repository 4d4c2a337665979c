import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from agentenv.sandbox import network
from agentenv.sandbox.network import Plan, host_rules, slot_rules, slots_in

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
    rules = slot_rules(plan(), internet=True, allow_private=("169.254.0.0/16", "10.1.0.0/16"))
    assert "ip daddr { 10.1.0.0/16 } accept" in rules
    assert rules.index("169.254.0.0/16") < rules.index("10.1.0.0/16")
    assert "169.254.0.0/16 } accept" not in rules
    assert "169.254.0.0/16 } accept" not in host_rules("t", UPLINK, ("169.254.0.0/16",))


def test_without_internet_nothing_is_accepted_outwards():
    rules = slot_rules(plan(), internet=False, allow_private=("10.1.0.0/16",))
    egress = rules.split("chain egress {")[1].split("}\n")[0]
    assert "accept" not in egress


def test_the_hosts_own_addresses_are_denied_before_anything_is_allowed():
    rules = slot_rules(plan(), internet=True, allow_private=("10.0.0.0/8",), host=("203.0.113.1",))
    assert rules.index("203.0.113.1") < rules.index("10.0.0.0/8 } accept")
