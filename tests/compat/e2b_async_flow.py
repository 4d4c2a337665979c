"""What a user of the official SDK's asynchronous face does; as e2b_flow.py, for what differs."""

import asyncio
import os
import sys
import time

import e2b
from e2b import AsyncSandbox, CommandExitException, NotFoundException, TimeoutException

STEPS = []


def step(function):
    STEPS.append(function)
    return function


async def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


@step
async def commands_with_callbacks_and_deadlines(sbx):
    seen = []
    done = await sbx.commands.run("for i in 1 2 3; do echo $i; done", on_stdout=seen.append)
    assert done.stdout == "".join(seen) == "1\n2\n3\n"
    for script, options, error in (
        ("exit 3", {}, CommandExitException),
        ("sleep 60", {"timeout": 1}, TimeoutException),
    ):
        try:
            await sbx.commands.run(script, **options)
        except error:
            continue
        raise AssertionError(f"{script} raised nothing")


@step
async def many_at_once(sbx):
    done = await asyncio.gather(*(sbx.commands.run(f"echo {n}") for n in range(20)))
    assert [one.stdout for one in done] == [f"{n}\n" for n in range(20)]


@step
async def background_with_input(sbx):
    handle = await sbx.commands.run("cat", background=True, stdin=True)
    await sbx.commands.send_stdin(handle.pid, "typed\n")
    await until(lambda: handle.stdout == "typed\n")
    other = await sbx.commands.connect(handle.pid)
    assert await other.kill() is True
    try:
        await handle.wait()
    except CommandExitException as error:
        assert error.exit_code != 0
    else:
        raise AssertionError("a killed command ended well")


@step
async def a_watch_streams_and_stops(sbx):
    events = []
    await sbx.files.make_dir("/tmp/async/inner")
    watch = await sbx.files.watch_dir("/tmp/async", on_event=events.append, recursive=True)
    await sbx.files.write("/tmp/async/inner/f", "x")
    await until(lambda: len(events) >= 3)
    assert [(e.name, e.type.value) for e in events] == [
        ("inner/f", "create"), ("inner/f", "chmod"), ("inner/f", "write"),
    ]  # fmt: skip
    await watch.stop()


@step
async def files_stream(sbx):
    blob = os.urandom(4_000_000)
    await sbx.files.write("/tmp/async/blob", blob)
    pieces = [
        bytes(piece) async for piece in await sbx.files.read("/tmp/async/blob", format="stream")
    ]
    assert b"".join(pieces) == blob
    try:
        await sbx.files.read("/tmp/none")
    except NotFoundException:
        pass
    else:
        raise AssertionError("a missing file was read")


@step
async def a_terminal(sbx):
    seen = []
    handle = await sbx.pty.create(
        size=e2b.PtySize(rows=30, cols=100), on_data=lambda data: seen.append(bytes(data))
    )
    await sbx.pty.send_stdin(handle.pid, b"stty size; exit 4\n")
    try:
        await handle.wait()
    except CommandExitException as error:
        assert error.exit_code == 4
    assert b"30 100" in b"".join(seen)


@step
async def leaving_a_stream_leaves_the_command(sbx):
    handle = await sbx.commands.run("sleep 600", background=True)
    await handle.disconnect()
    assert handle.pid in [p.pid for p in await sbx.commands.list()]
    assert await sbx.commands.kill(handle.pid) is True


@step
async def metrics_and_kill(sbx):
    deadline = time.monotonic() + 30
    while not await sbx.get_metrics():
        assert time.monotonic() < deadline
    assert await sbx.kill() is True and await sbx.is_running() is False


async def main():
    sbx = await AsyncSandbox.create("base", timeout=600, request_timeout=300)
    try:
        for function in STEPS:
            await function(sbx)
            print(f"held {function.__name__}", flush=True)
    finally:
        await AsyncSandbox.kill(sbx.sandbox_id)


if __name__ == "__main__":
    asyncio.run(main())
    # The SDK's native HTTP threads (pyqwest) can abort an interpreter that is being finalized.
    sys.stdout.flush()
    os._exit(0)
