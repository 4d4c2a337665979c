"""The part of the demo that is about time: template, pause, snapshot, copies, by E2B's SDK."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from e2b import Sandbox, Template, wait_for_file

# Counts in memory, and says how far it is.
COUNTER = """python3 -c '
import os, time, itertools
for n in itertools.count():
    open("/tmp/n", "w").write(str(n))
    os.replace("/tmp/n", "/tmp/count")
    time.sleep(0.05)
'"""


@contextmanager
def told(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"  {what}: {(time.monotonic() - begun) * 1e3:.0f} ms")


def count(sandbox: Sandbox) -> int:
    return int(sandbox.commands.run("cat /tmp/count").stdout)


def main() -> None:
    recipe = (
        Template()
        .from_template("base")
        .set_envs({"GREETING": "hello"})
        .run_cmd("mkdir -p /srv/app && echo $GREETING > /srv/app/greeting", user="root")
        .set_start_cmd(COUNTER, wait_for_file("/tmp/count"))
    )
    with told("Template.build with a process that counts"):
        Template.build(recipe, "counting")
    with told("Template.build again, from kept steps"):
        Template.build(recipe, "counting")
    Sandbox.create("counting", timeout=60).kill()  # from now on a machine waits for the next
    with told("Sandbox.create: the process counts already"):
        sandbox = Sandbox.create("counting", timeout=600)
    try:
        before = count(sandbox)
        with told("sandbox.pause()"):
            sandbox.pause()
        with told("Sandbox.connect: it counts on"):
            sandbox.connect(timeout=600)
        assert count(sandbox) >= before > 0
        with told("create_snapshot while it runs"):
            saved = sandbox.create_snapshot(name="saved")
        with told("fork of 3, all running"):
            copies = sandbox.fork(count=3)
        counts = [count(each) for each in (*copies, sandbox)]
        names = {each.commands.run("hostname").stdout.strip() for each in (*copies, sandbox)}
        print(f"  {len(names)} names; they count on from {before}: {counts}")
        assert len(names) == 4 and min(counts) >= before
        for copy in copies:
            copy.kill()
        Sandbox.delete_snapshot(saved.snapshot_id)
    finally:
        sandbox.kill()


if __name__ == "__main__":
    main()
