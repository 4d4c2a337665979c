"""`aenv shell` in a real terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest
from tests.server import AENV


class Terminal:
    """A terminal with `aenv shell` in it."""

    def __init__(self, server, sandbox_id):
        self.main, other = pty.openpty()
        self.resize(100, 30)
        self.before = termios.tcgetattr(other)
        self.process = subprocess.Popen(
            [*AENV, "shell", sandbox_id], stdin=other, stdout=other, stderr=other,
            start_new_session=True,
            env={**os.environ, "AENV_HOME": str(server.home), "AENV_URL": server.url, "TERM": "dumb"},
        )  # fmt: skip
        self.other, self.seen = other, b""

    def resize(self, cols, rows):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys):
        os.write(self.main, keys)

    def until(self, needle):
        deadline = time.monotonic() + 60
        while needle not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.main], [], [], 0.1)[0]:
                self.seen += os.read(self.main, 65536)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.main)
        os.close(self.other)


@pytest.fixture
def terminal(server):
    made = server.create("base", timeout=600)["sandboxID"]
    shown = Terminal(server, made)
    yield shown
    shown.close()
    server.cli("kill", made, check=True)


def test_a_shell_with_sizes_interrupts_and_its_exit_code(terminal):
    terminal.type(b"stty size; echo $TERM; tty\r")
    for needle in (b"30 100\r\n", b"dumb\r\n", b"/dev/pts/"):
        terminal.until(needle)
    terminal.resize(120, 50)
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.type(b"while :; do stty size | grep '50 120' && break; done\r")
    terminal.until(b"50 120\r\n")
    # Said by the job itself: only then is it in the foreground, where ^C goes.
    terminal.type(b"sh -c 'echo be$((1 + 1))gun; exec sleep 1000'\r")
    terminal.until(b"be2gun")
    terminal.type(b"\x03")
    terminal.type(b"echo code=$?; exit 5\r")
    terminal.until(b"code=130")
    assert terminal.process.wait(60) == 5
    assert termios.tcgetattr(terminal.other) == terminal.before


def test_a_pipe_is_no_terminal(server):
    done = server.cli("shell", "a" * 20)
    assert done.returncode == 64 and b"aenv exec" in done.stderr
