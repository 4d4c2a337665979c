"""The part of the demo that a user writes: plain E2B SDK code."""

import os
import time
import urllib.request

from e2b import PtySize, Sandbox


def main() -> None:
    begun = time.monotonic()
    sandbox = Sandbox.create(timeout=600, request_timeout=300)
    print(f"  Sandbox.create(): {sandbox.sandbox_id} after {time.monotonic() - begun:.2f} s")
    try:
        commands(sandbox)
        files(sandbox)
        watch(sandbox)
        terminal(sandbox)
        web_server(sandbox)
        signed_url(sandbox)
    finally:
        sandbox.kill()
    print(f"  sandbox.kill(); is_running: {sandbox.is_running()}")


def commands(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    done = sandbox.commands.run("python3 -c 'print(6 * 7)'; whoami; nproc")
    print(f"  commands.run: {done.stdout.split()} in {time.monotonic() - begun:.2f} s")
    handle = sandbox.commands.run(
        "while read line; do echo got $line; done", background=True, stdin=True
    )
    sandbox.commands.send_stdin(handle.pid, "first\nsecond\n")
    sandbox.commands.close_stdin(handle.pid)
    print(f"  background with stdin: {handle.wait().stdout.split()}")


def files(sandbox: Sandbox) -> None:
    data = os.urandom(1_000_000)
    begun = time.monotonic()
    sandbox.files.write("/tmp/site/data.bin", data)
    back = bytes(sandbox.files.read("/tmp/site/data.bin", format="bytes"))
    took = time.monotonic() - begun
    assert back == data
    print(f"  files: 1 MB written and read back, identical, in {took:.2f} s")
    sandbox.files.write("/tmp/site/index.html", "<h1>hello from a sandbox</h1>")
    print(f"  files.list: {[entry.name for entry in sandbox.files.list('/tmp/site')]}")


def watch(sandbox: Sandbox) -> None:
    watching = sandbox.files.watch_dir("/tmp/site")
    sandbox.files.write("/tmp/site/new.txt", "x")
    events = [f"{event.type.value} {event.name}" for event in watching.get_new_events()]
    watching.stop()
    print(f"  files.watch_dir: {events}")


def terminal(sandbox: Sandbox) -> None:
    handle = sandbox.pty.create(size=PtySize(rows=30, cols=100))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit 0\n")
    shown = b"".join(bytes(pty) for _, _, pty in handle if pty)
    size = next(line for line in shown.splitlines() if line.strip() == b"30 100")
    print(f"  pty.create: a terminal of {size.decode()}")


SERVER = """
import os, socketserver, threading
class Page(socketserver.StreamRequestHandler):
    def handle(self):
        while self.rfile.readline().strip():
            pass
        body = open('/tmp/site/index.html', 'rb').read()
        self.wfile.write(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)
socketserver.ThreadingTCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer(('0.0.0.0', 8080), Page)
print('listening', flush=True)
server.serve_forever()
"""


def web_server(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/server.py", SERVER)
    handle = sandbox.commands.run("python3 /tmp/server.py", background=True)
    for out, _err, _pty in handle:
        if out and "listening" in out:
            break
    base = os.environ["E2B_SANDBOX_URL"]
    request = urllib.request.Request(
        base + "/", headers={"Host": f"8080-{sandbox.sandbox_id}.localhost"}
    )
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        page = answer.read().decode()
    print(
        f"  GET http://8080-{sandbox.sandbox_id}.localhost/ -> {page!r}"
        f" in {time.monotonic() - begun:.3f} s"
    )


def signed_url(sandbox: Sandbox) -> None:
    url = sandbox.download_url("/tmp/site/index.html", use_signature_expiration=60)
    with urllib.request.urlopen(url, timeout=60) as answer:
        print(f"  download_url: {len(answer.read())} bytes for whoever has the URL, for a minute")


if __name__ == "__main__":
    main()
