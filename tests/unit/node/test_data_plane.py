from agentenv.node.data_plane import name_servers, upstreams

RESOLV = "# made by hand\nsearch x\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\nnameserver\n"


def test_name_servers_of_a_resolv_conf():
    assert name_servers(RESOLV) == ("192.0.2.1:53", "[fe80::1]:53")


def test_what_is_configured_wins():
    files = {"/etc/resolv.conf": RESOLV}
    assert upstreams(("198.51.100.1", "198.51.100.2:5353"), files) == (
        "198.51.100.1:53",
        "198.51.100.2:5353",
    )
    assert upstreams((), files) == ("192.0.2.1:53", "[fe80::1]:53")
    assert upstreams((), {}) == ()


def test_a_stubs_own_upstreams_come_before_the_stub():
    files = {
        "/etc/resolv.conf": "nameserver 127.0.0.53\n",
        "/run/systemd/resolve/resolv.conf": "nameserver 192.0.2.7\n",
    }
    assert upstreams((), files) == ("192.0.2.7:53",)
