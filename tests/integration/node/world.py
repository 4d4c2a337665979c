"""A small internet in namespaces of the test: the machine's own network is never touched.

    guest --tap-- slot --veth-- host (this thread) --veth-- world
                                                            203.0.113.2   the gateway
                                                            198.51.100.10 a server outside
                                                            192.168.77.10 a neighbour in the LAN
                                                            169.254.169.254 the cloud's metadata

``world`` moves the calling thread into a fresh "host" namespace; threads and processes that are
started meanwhile inherit it. A ``Guest`` stands for the virtual machine: a namespace whose tap is
joined to the slot's tap by a thread that carries frames between the two descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentenv.host import netns
from agentenv.node.slots import SlotPool
from agentenv.sandbox import network

CLONE_NEWNET = 0x40000000
IP_PKTINFO = 8
HOST, GATEWAY = "203.0.113.1", "203.0.113.2"
OUTSIDE = "198.51.100.10"
LAN, METADATA, DOCKER = "192.168.77.10", "169.254.169.254", "172.17.0.1"
PORT = 8080
# An answer, positive or negative, comes in microseconds here; this bounds a silent drop.
SILENCE = 0.4
_libc = ctypes.CDLL(None, use_errno=True)


def _setns(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def tool(*argv: str | Path, where: Path | None = None, stdin: str | None = None) -> str:
    entered = ("nsenter", f"--net={where}") if where else ()
    done = subprocess.run([*entered, *argv], input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


def open_socket(where: Path | None, kind: socket.SocketKind) -> socket.socket:
    def make() -> socket.socket:
        return socket.socket(socket.AF_INET, kind)

    return netns.inside(where, make) if where else make()


class Server:
    """Answers each TCP connection and each datagram with the caller's address."""

    def __init__(self, where: Path | None, port: int = PORT) -> None:
        self.tcp = open_socket(where, socket.SOCK_STREAM)
        self.udp = open_socket(where, socket.SOCK_DGRAM)
        for made in (self.tcp, self.udp):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("0.0.0.0", port))
        self.udp.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        self.tcp.listen(64)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self.tcp, self.udp, self._stop_read], [], [])
            if self._stop_read in ready:
                return
            if self.tcp in ready:
                connection, peer = self.tcp.accept()
                connection.sendall(peer[0].encode())
                connection.close()
            if self.udp in ready:
                _, [(_, _, info)], _, peer = self.udp.recvmsg(2048, 64)
                # From the address that was asked, which the kernel would not choose by itself.
                answer_from = (socket.IPPROTO_IP, IP_PKTINFO, bytes(4) + info[8:12] + bytes(4))
                self.udp.sendmsg([peer[0].encode()], [answer_from], 0, peer)

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        for made in (self.tcp, self.udp):
            made.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


class Guest:
    """What a virtual machine is to the slot: the holder of the tap's descriptor."""

    def __init__(self, folder: Path, pool: SlotPool, index: int) -> None:
        self.netns = folder / f"guest-{index}"
        place = pool.attachment(index)
        netns.create(self.netns)
        self.ip("tuntap", "add", "eth0", "mode", "tap", "vnet_hdr")
        self._slot_end = netns.open_tap(place.netns, place.tap)
        self._guest_end = netns.open_tap(self.netns, "eth0")
        self.ip("link", "set", "lo", "up")
        self.ip("link", "set", "eth0", "address", place.mac, "up")
        self.ip("addr", "add", place.address, "dev", "eth0")
        self.ip("route", "add", "default", "via", place.gateway)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def ip(self, *words: str) -> str:
        return tool("ip", *words, where=self.netns)

    def _carry(self) -> None:
        other = {self._slot_end: self._guest_end, self._guest_end: self._slot_end}
        while True:
            ready, _, _ = select.select([*other, self._stop_read], [], [])
            if self._stop_read in ready:
                return
            for fd in ready:
                os.write(other[fd], os.read(fd, 65536))

    def ask(self, host: str, port: int = PORT, patience: float = 10) -> str:
        """What the server said (the address it saw); raises OSError or TimeoutError."""
        with open_socket(self.netns, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience)
            connection.connect((host, port))
            return connection.recv(100).decode()

    def ask_udp(self, host: str, port: int = PORT, patience: float = 10) -> str:
        with open_socket(self.netns, socket.SOCK_DGRAM) as asking:
            asking.settimeout(patience)
            asking.connect((host, port))
            asking.send(b"?")
            return asking.recv(100).decode()

    def reaches(self, host: str, port: int = PORT) -> bool:
        return _works(self.ask, host, port, SILENCE)

    def reaches_udp(self, host: str, port: int = PORT) -> bool:
        return _works(self.ask_udp, host, port, SILENCE)

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        for fd in (self._slot_end, self._guest_end, self._stop_read, self._stop_write):
            os.close(fd)
        netns.delete(self.netns)


def _works(ask, *args) -> bool:
    try:
        return bool(ask(*args))
    except (TimeoutError, ConnectionRefusedError):
        return False
    except OSError as error:
        assert error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES}, error
        return False


class World:
    """The host's namespace (entered), the world beyond it, and services in both."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.outside = folder / "world"

    def guest(self, pool: SlotPool, index: int) -> Guest:
        made = Guest(self.folder, pool, index)
        self._stack.callback(made.close)
        return made

    def server(self, where: Path | None, port: int = PORT) -> Server:
        made = Server(where, port)
        self._stack.callback(made.close)
        return made


@contextmanager
def world() -> Iterator[World]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-net-")))
        _enter_host(stack, folder / "host")
        made = World(folder, stack)
        netns.create(made.outside)
        stack.callback(netns.delete, made.outside)
        tool("ip", "link", "set", "lo", "up")
        tool("ip", "link", "add", "ext0", "type", "veth", "peer", "int0", "netns", made.outside)
        tool("ip", "addr", "add", f"{HOST}/24", "dev", "ext0")
        tool("ip", "link", "set", "ext0", "up")
        outside = [f"{GATEWAY}/24 dev int0"]
        outside += [f"{address}/32 dev lo" for address in (OUTSIDE, LAN, METADATA)]
        for words in (*(f"addr add {a}" for a in outside), "link set int0 up", "link set lo up"):
            tool("ip", *words.split(), where=made.outside)
        tool("ip", "route", "add", "default", "via", GATEWAY)
        tool("ip", "link", "add", "docker0", "type", "bridge")
        tool("ip", "addr", "add", f"{DOCKER}/16", "dev", "docker0")
        tool("ip", "link", "set", "docker0", "up")
        made.server(made.outside)
        made.server(None)
        yield made


def _enter_host(stack: ExitStack, path: Path) -> None:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    stack.callback(os.close, before)
    netns.create(path)
    stack.callback(netns.delete, path)
    host = os.open(path, os.O_RDONLY)
    try:
        _setns(host)
    finally:
        os.close(host)
    stack.callback(_setns, before)


def open_slot_fence(pool: SlotPool, index: int) -> None:
    """Take the fence in the slot away, keeping its address translation."""
    chains = ("input", "forward", "output")
    flushed = "".join(
        f"flush chain inet agentenv {chain}\nadd chain inet agentenv {chain} {{ policy accept; }}\n"
        for chain in chains
    )
    tool("nft", "-f", "-", where=pool.netns(index), stdin=flushed)


def open_host_fence(tag: str) -> None:
    """Take the fence on the host away, keeping its address translation."""
    table = network.host_table(tag)
    flushed = "".join(f"flush chain inet {table} {c}\n" for c in ("input", "forward"))
    tool("nft", "-f", "-", stdin=flushed)
