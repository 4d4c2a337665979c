"""Addresses and firewall rules of a sandbox's network, as text. Pure.

A slot is a router namespace between the guest (tap) and the host (veth "uplink"). The guest's
side is the same everywhere; the uplink has a /31 of its own. Two fences deny by default: one in
the router namespace, one on the host, either of which holds alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentenv.errors import UserError

GUEST_MAC = "02:ae:00:00:00:02"
# Fixed: a random one on the host's side costs a restored guest seconds of stale ARP (DESIGN.md).
TAP_MAC = "02:ae:00:00:00:01"
TAP, UPLINK = "tap0", "up0"
MAX_INTERFACE_NAME = 15

# What is not the public internet (IANA special-purpose registry), so neither are this node,
# its neighbours, its cloud's metadata service, nor other sandboxes.
PRIVATE = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
    "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3",
)  # fmt: skip
# Never to be allowed, whatever the operator writes: the cloud's credentials live there.
ALWAYS_DENIED = ("127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3")

EVERYTHING = "0.0.0.0/0"
MAX_RANGES = 1000  # of one list: a ruleset must load in milliseconds
_HOST = re.compile(r"[A-Za-z0-9.:_\[\]-]+")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a sandbox may reach, and who reaches it.

    ``allow_out`` and ``deny_out`` are IPv4 ranges in CIDR form; the first wins over the second, and
    neither opens what the node closes. Without ``internet`` only ``allow_out`` is reached. Ports
    of one that is not ``public`` want its traffic token; ``mask_host`` is what its servers see as
    Host, ``${PORT}`` in it standing for the port.
    """

    internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    public: bool = True
    mask_host: str | None = None

    @property
    def resolves(self) -> bool:
        """Whether names are looked up: a question leaves the machine, so all-denied asks none."""
        return self.internet and EVERYTHING not in self.deny_out


def ranges(field: str, given: Sequence[str]) -> tuple[str, ...]:
    """Addresses and ranges in CIDR form. Raises UserError naming the field and the entry."""
    if len(given) > MAX_RANGES:
        raise UserError(f"{field} has more than {MAX_RANGES} entries", fix="join ranges")
    return tuple(dict.fromkeys(_range(field, text) for text in given))


def _range(field: str, text: str) -> str:
    try:
        return str(ipaddress.IPv4Network(text.strip(), strict=False))
    except ValueError:
        name = text.strip().removeprefix("*.")
        if re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9.-]+", name):
            raise UserError(
                f"{field}: {text!r} is a domain, which this version cannot filter by",
                fix="give addresses or ranges",
                code="not_supported",
            ) from None
        raise UserError(
            f"{field}: {text!r} is no IPv4 address or range", fix="such as 8.8.8.8 or 10.0.0.0/8"
        ) from None


def host_mask(text: str) -> str:
    """A checked ``maskRequestHost``. Raises UserError."""
    if len(text) > 255 or not _HOST.fullmatch(text.replace("${PORT}", "1")):
        raise UserError(f"maskRequestHost {text!r} is no host", fix="such as localhost:${PORT}")
    return text


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of the slot ``index`` of a home; ``tag`` is the home's 8 hex digits."""

    tag: str
    index: int
    inner: ipaddress.IPv4Network
    uplink: ipaddress.IPv4Network

    @property
    def gateway(self) -> str:
        return str(self.inner[1])

    @property
    def guest(self) -> str:
        return str(self.inner[2])

    @property
    def guest_cidr(self) -> str:
        return f"{self.guest}/{self.inner.prefixlen}"

    @property
    def host_side(self) -> str:
        return str(self.uplink[2 * self.index])

    @property
    def slot_side(self) -> str:
        return str(self.uplink[2 * self.index + 1])

    @property
    def host_interface(self) -> str:
        return f"{interface_prefix(self.tag)}{self.index:04x}"


def interface_prefix(tag: str) -> str:
    """Of the host's ends of a home's uplinks; 11 characters, 4 hex digits follow."""
    return f"ae{tag}-"


def slots_in(uplink: ipaddress.IPv4Network) -> int:
    """How many slots the range holds (a /31 each; interface names bound it at 65536)."""
    return min(uplink.num_addresses // 2, 1 << 16)


def links(plan: Plan) -> str:
    """Input of `ip -batch` inside the slot's namespace; the uplink's end is there already."""
    return f"""\
link set lo up
tuntap add dev {TAP} mode tap vnet_hdr
link set {TAP} address {TAP_MAC}
addr add {plan.gateway}/{plan.inner.prefixlen} dev {TAP}
link set {TAP} up
addr add {plan.slot_side}/31 dev {UPLINK}
link set {UPLINK} up
route add default via {plan.host_side}
"""


def slot_rules(
    plan: Plan, policy: Policy, *, allow_private: Sequence[str], host: Sequence[str] = ()
) -> str:
    """The router namespace's whole ruleset; loading it replaces the former one atomically.

    ``host`` are the machine's own addresses, public ones too.
    """
    egress = [_to(ALWAYS_DENIED, "drop"), _to(host, "drop"), _to(policy.allow_out, "goto open")]
    if policy.internet:
        egress += [_to(policy.deny_out, "drop"), "goto open"]
    open_ = [_to(_without(allow_private, ALWAYS_DENIED), "accept"), _to(PRIVATE, "drop"), "accept"]
    return f"""\
table inet agentenv
delete table inet agentenv
table inet agentenv {{
  chain input {{
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iifname "lo" accept
    iifname "{TAP}" ip saddr {plan.guest} ip daddr {plan.gateway} jump services
  }}
  chain services {{
    meta l4proto {{ tcp, udp }} th dport 53 accept
    icmp type echo-request accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "{UPLINK}" oifname "{TAP}" ct state established,related accept
    iifname "{TAP}" oifname "{UPLINK}" ip saddr {plan.guest} jump egress
  }}
  chain open {{
    {_lines(open_)}
  }}
  chain egress {{
    {_lines(egress)}
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    oifname {{ "lo", "{TAP}" }} accept
    ct state established,related accept
  }}
  chain translate {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" masquerade
  }}
}}
"""


def host_rules(tag: str, uplink: ipaddress.IPv4Network, allow_private: Sequence[str]) -> str:
    """The host's table of this home: the second fence, and the way out."""
    ours = f"{interface_prefix(tag)}*"
    allowed = _without(allow_private, ALWAYS_DENIED)
    allow = f'iifname "{ours}" ip daddr {{ {", ".join(allowed)} }} accept' if allowed else ""
    return f"""\
table inet {host_table(tag)}
delete table inet {host_table(tag)}
table inet {host_table(tag)} {{
  chain input {{
    type filter hook input priority filter - 5; policy accept;
    iifname "{ours}" drop
  }}
  chain forward {{
    type filter hook forward priority filter - 5; policy accept;
    oifname "{ours}" ct state established,related accept
    oifname "{ours}" drop
    iifname "{ours}" ip saddr != {uplink} drop
    iifname "{ours}" ip daddr {{ {", ".join(ALWAYS_DENIED)} }} drop
    {allow}
    iifname "{ours}" ip daddr {{ {", ".join(PRIVATE)} }} drop
    iifname "{ours}" meta nfproto ipv6 drop
  }}
  chain translate {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {uplink} oifname != "{ours}" masquerade
  }}
}}
"""


def host_table(tag: str) -> str:
    return f"agentenv_{tag}"


def _without(networks: Sequence[str], denied: Sequence[str]) -> list[str]:
    """The networks that overlap none of the denied ones."""
    out = [ipaddress.IPv4Network(text) for text in denied]
    return [n for n in networks if not any(ipaddress.IPv4Network(n).overlaps(d) for d in out)]


def _to(networks: Sequence[str], verdict: str) -> str:
    """A rule for these destinations; none for none."""
    if not networks:
        return ""
    found = ipaddress.collapse_addresses(ipaddress.IPv4Network(text) for text in networks)
    return f"ip daddr {{ {', '.join(map(str, found))} }} {verdict}"


def _lines(rules: Sequence[str]) -> str:
    return "\n    ".join(filter(None, rules))
