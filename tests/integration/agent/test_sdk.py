"""Our SDK's in-guest side against a real agent: commands, files, ports, and its thin sync face."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from agentenv.errors import GuestError, NotFound, UserError
from agentenv.sdk import CommandFailed, CommandTimedOut, Sandbox, TerminalSize
from agentenv.sdk.client import Address, Client
from agentenv.sdk.sync import Face, _Loop

MADE = {"sandboxID": "a" * 20, "envdAccessToken": None}


@pytest.fixture
async def sandbox(agent):
    url = f"http://{agent.address[0]}:{agent.address[1]}"
    async with Client(Address(url, "no key")) as client:
        yield Sandbox(client, MADE)


async def test_a_command_and_its_result(sandbox):
    done = await sandbox.commands.run("cat; echo $A >&2", stdin=b"in\0", env={"A": "b"})
    assert (done.stdout, done.stderr, done.exit_code) == (b"in\0", b"b\n", 0)
    assert (await sandbox.commands.run(["printf", "%s", "$HOME"])).text == "$HOME"


async def test_failures_are_told_apart_by_who_must_act(sandbox):
    with pytest.raises(CommandFailed, match="no such thing") as failed:
        await sandbox.commands.run("echo out; echo no such thing >&2; exit 3")
    assert failed.value.result.exit_code == 3 and failed.value.result.stdout == b"out\n"
    assert (await sandbox.commands.run("kill -9 $$", check=False)).exit_code == 137
    with pytest.raises(CommandTimedOut) as late:
        await sandbox.commands.run("echo early; sleep 60", timeout=0.5)
    assert late.value.result.stdout == b"early\n"
    with pytest.raises(UserError, match="cannot be executed") as refused:
        await sandbox.commands.run(["/nonexistent"])
    assert refused.value.code == "invalid_argument"
    with pytest.raises(UserError, match="invalid username"):
        await sandbox.commands.run("true", user="nobody-here")


async def test_a_command_in_the_background(sandbox):
    async with await sandbox.commands.start(
        "while read x; do echo got $x; done", stdin=True
    ) as running:
        await running.send(b"one\n")
        async for piece in running:
            assert piece.data == b"got one\n"
            break
        again = await sandbox.commands.connect(running.pid)
        await running.send(b"two\n")
        await running.close_stdin()
        assert (await again.wait()).stdout == b"got two\n"
        assert (await running.wait()).stdout == b"got one\ngot two\n"
    with pytest.raises(NotFound):
        await sandbox.commands.connect(4_000_000)


async def test_leaving_the_block_ends_the_command(sandbox):
    async with await sandbox.commands.start("sleep 60", tag="left") as running:
        assert [p["tag"] for p in await sandbox.commands.list()] == ["left"]
    async with asyncio.timeout(10):
        while await sandbox.commands.list():
            await asyncio.sleep(0.01)
    await running.kill()  # already so is success


async def test_a_terminal(sandbox):
    size = TerminalSize(100, 30)
    async with await sandbox.commands.start(
        "stty size; read x; stty size", terminal=size
    ) as running:
        async for piece in running:
            if b"30 100" in piece.data:
                await running.resize(120, 40)
                await running.type(b"\n")
        assert b"40 120" in running.result.stdout


async def test_files(sandbox, tmp_path):
    path = str(tmp_path / "a" / "f")
    await sandbox.files.write(path, "text", metadata={"k": "v"})
    assert await sandbox.files.read(path) == b"text"
    entry = await sandbox.files.stat(path)
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("f", "file", 4, 0o644)
    assert not await sandbox.files.make_dir(str(tmp_path / "a"))
    assert await sandbox.files.make_dir(str(tmp_path / "b"))
    (tmp_path / "local").write_bytes(os.urandom(700_000))
    await sandbox.files.write(str(tmp_path / "b" / "g"), tmp_path / "local")
    assert (tmp_path / "b" / "g").read_bytes() == (tmp_path / "local").read_bytes()
    assert (await sandbox.files.move(path, str(tmp_path / "c"))).name == "c"
    assert [entry.name for entry in await sandbox.files.list(str(tmp_path), depth=2)] == [
        "a",
        "b",
        "g",
        "c",
        "local",
    ]
    await sandbox.files.remove(str(tmp_path / "b"))
    assert not await sandbox.files.exists(str(tmp_path / "b"))
    with pytest.raises(NotFound):
        await sandbox.files.read(str(tmp_path / "none"))


async def test_a_watch(sandbox, tmp_path):
    watching = sandbox.files.watch(str(tmp_path))
    first = asyncio.ensure_future(anext(watching))
    async with asyncio.timeout(10):
        while not first.done():
            (tmp_path / "f").write_bytes(b"1")
            await asyncio.sleep(0.01)
    assert first.result().name == "f"
    await watching.aclose()


async def test_trees_go_in_and_come_out(sandbox, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "f").write_bytes(b"1")
    (tree / "link").symlink_to("sub/f")
    with (tree / "holes").open("wb") as file:
        for number in range(60):
            file.seek(number << 20)
            file.write(b"island")
        file.truncate(100 << 20)
    (tree / "sub").chmod(0o750)
    os.utime(tree / "sub", (1, 1_400_000_000))
    await sandbox.files.upload(tree, str(tmp_path / "in"), name="copy")
    out = tmp_path / "out"
    out.mkdir()
    await sandbox.files.download(str(tmp_path / "in" / "copy"), out, name="back")
    for place in (tmp_path / "in" / "copy", out / "back"):
        assert subprocess.run(["diff", "-r", tree, place]).returncode == 0
        assert (place / "holes").stat().st_blocks * 512 < 2 << 20
        assert os.readlink(place / "link") == "sub/f"
        stat = (place / "sub").stat()
        assert (stat.st_mode & 0o777, stat.st_mtime) == (0o750, 1_400_000_000)
    with pytest.raises(UserError, match="does not exist"):
        await sandbox.files.upload(tmp_path / "none", "/tmp")
    with pytest.raises(NotFound):
        await sandbox.files.download(str(tmp_path / "none"), out)


async def test_a_port_is_forwarded_and_a_closed_one_says_so(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(100).upper())

        thread = threading.Thread(target=serve)
        thread.start()
        async with sandbox.ports.forward(listener.getsockname()[1]) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"hello")
            assert await reader.read(100) == b"HELLO"
            writer.close()
        thread.join()
    with pytest.raises(GuestError, match="does not answer") as closed:
        await sandbox.ports.connect(1)
    assert closed.value.code == "guest_port_closed"


def test_the_same_without_await(agent, tmp_path):
    loop = _Loop()
    url = f"http://{agent.address[0]}:{agent.address[1]}"

    async def make():
        return Sandbox(Client(Address(url, "no key")), MADE)

    sandbox = Face(loop, loop.run(make()))
    assert sandbox.commands.run("echo hi").text == "hi\n"
    with pytest.raises(CommandFailed):
        sandbox.commands.run("exit 1")
    with sandbox.commands.start("echo a; echo b") as running:
        assert b"".join(piece.data for piece in running) == b"a\nb\n"
    sandbox.files.write(str(tmp_path / "f"), b"1")
    assert b"".join(sandbox.files.stream(str(tmp_path / "f"))) == b"1"
    loop.close()


def test_programs_that_use_it_load_no_server_code():
    code = (
        "import sys, agentenv.sdk, agentenv.sdk.sync; "
        "print(sorted({'fastapi', 'starlette', 'uvicorn', 'sqlalchemy', 'ray', 'agentenv._core'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_input_and_output_of_any_size_at_once(sandbox):
    data = os.urandom(3_000_000)
    assert (await sandbox.commands.run("cat", stdin=data)).stdout == data
    assert (await sandbox.commands.run("head -c 5", stdin=data)).stdout == data[:5]
    assert (await sandbox.commands.run("true", stdin=data)).exit_code == 0


async def test_a_wait_that_was_given_up_can_be_taken_up(sandbox):
    async with await sandbox.commands.start("read x; echo $x", stdin=True) as running:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.wait(), 0.2)
        both = asyncio.gather(running.wait(), running.wait())
        await asyncio.sleep(0)
        await running.send(b"late\n")
        assert [done.exit_code for done in await both] == [0, 0]


async def test_arguments_that_cannot_be(sandbox, tmp_path):
    with pytest.raises(UserError, match="empty"):
        await sandbox.commands.run([])
    assert (await sandbox.commands.run("echo 1", timeout=float("inf"))).text == "1\n"
    with pytest.raises(UserError, match="printable"):
        await sandbox.files.write(str(tmp_path / "f"), b"", metadata={"a": "b\nc"})
    await sandbox.files.write(str(tmp_path / "f"), b"", metadata={"a": "ü"})
    assert os.getxattr(tmp_path / "f", "user.e2b.a") == "ü".encode()


def test_a_closed_face_says_so_and_leaves_no_thread():
    from agentenv.sdk.sync import AgentEnv

    before = threading.active_count()
    with AgentEnv("http://127.0.0.1:9", "key") as env:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with pytest.raises(UserError, match="closed"):
        env.sandboxes()
