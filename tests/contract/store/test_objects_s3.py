"""Object stores in S3: who we are to the server, and what happens when it fails."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tests.s3 import s3_server
from tests.waiting import until

from agentenv.errors import InfraError, UserError
from agentenv.host.mount import mounted
from agentenv.store.objects import open_objects


async def refused(awaitable, code):
    """That it ends, and how."""
    with pytest.raises(InfraError) as caught:
        await asyncio.wait_for(awaitable, 60)
    assert caught.value.code == code, caught.value.message
    return caught.value.message


def every_kind_of_call(objects, path):
    yield objects.get("a", 1)
    yield objects.get_range("a", 0, 1)
    yield objects.get_to("a", path / "target")
    yield objects.put("a", b"")
    yield objects.put_new("a", b"")
    yield objects.put_file("a", path / "source")
    yield objects.head("a")
    yield objects.list("")
    yield objects.delete(["a"])
    yield objects.delete(["a", "b"])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "source").write_bytes(os.urandom(17 << 20))
    return tmp_path


async def test_a_wrong_secret_is_denied_everywhere(s3_keys, files, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    objects = await open_objects(s3_keys.url())
    for call in every_kind_of_call(objects, files):
        message = await refused(call, "store_denied")
        assert "wrong" not in message and s3_keys.bucket in message
    assert not (files / "target").exists()


async def test_without_an_identity_it_is_denied_at_once(s3, no_identity):
    objects = await open_objects(s3.url())
    message = await refused(objects.get("a", 1), "store_denied")
    assert "AWS_ACCESS_KEY_ID" in message and "default" in message


def write_profile(path, server, secret=None, profile="default"):
    path.parent.mkdir(exist_ok=True)
    secret = secret or server.secret_key
    path.write_text(
        f"[{profile}]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {secret}\n"
    )


async def test_keys_in_a_file_that_changes(s3, no_identity):
    file = no_identity / ".aws/credentials"
    objects = await open_objects(s3.url("file"))
    write_profile(file, s3, "not yet right")
    await refused(objects.list(""), "store_denied")
    write_profile(file, s3)
    await objects.put("a", b"x")
    file.unlink()
    await refused(objects.list(""), "store_denied")


async def test_a_profile_named_in_the_url(s3_keys, no_identity, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(no_identity / "elsewhere/config"))
    write_profile(no_identity / "elsewhere/config", s3_keys, profile="profile one")
    objects = await open_objects(s3_keys.url("profile", profile="one"))
    await objects.put("a", b"x")


async def test_keys_from_a_program(s3, no_identity):
    answer = (
        f'{{"Version": 1, "AccessKeyId": "{s3.access_key}", "SecretAccessKey": "{s3.secret_key}"}}'
    )
    (no_identity / "answer").write_text(answer)
    (no_identity / ".aws").mkdir()
    config = no_identity / ".aws/config"
    config.write_text(f"[default]\ncredential_process = cat '{no_identity}/answer'\n")
    objects = await open_objects(s3.url("program"))
    await objects.put("a", b"x")
    config.write_text("[default]\ncredential_process = false\n")
    await refused(objects.list(""), "store_denied")


@pytest.mark.parametrize("style", ["path", "virtual"])
async def test_both_kinds_of_address(s3_keys, style):
    objects = await open_objects(s3_keys.url(f"style-{style}", style=style))
    await objects.put_new("p/ab", b"x")
    assert [entry.key for entry in await objects.list("p/")] == ["p/ab"]
    await objects.delete(["p/ab", "p/cd"])
    assert await objects.list("") == []


async def test_a_bucket_that_is_not_there_is_the_users_fault(s3_keys):
    objects = await open_objects(s3_keys.url().replace(s3_keys.bucket, "nowhere", 1))
    with pytest.raises(UserError, match="no such bucket"):
        await objects.list("")


async def test_prefixes_are_stores_of_their_own(s3_keys):
    one, two = [await open_objects(s3_keys.url(f"own/{name}")) for name in ("a", "ab")]
    await one.put("x", b"1")
    await two.put("y", b"2")
    assert [entry.key for entry in await one.list("")] == ["x"]


async def test_what_is_not_ours_is_not_listed(s3_keys):
    objects = await open_objects(s3_keys.url("foreign"))
    await objects.put("good", b"")
    (s3_keys.files / "foreign/Foreign").write_bytes(b"")
    assert [entry.key for entry in await objects.list("")] == ["good"]


async def test_a_killed_server_is_unavailable_until_it_is_back(no_identity, files, monkeypatch):
    async with s3_server() as server:
        for name, value in server.keys.items():
            monkeypatch.setenv(name, value)
        objects = await open_objects(server.url())
        await objects.put("kept", b"kept")
        server.kill()
        for call in every_kind_of_call(objects, files):
            await refused(call, "store_unavailable")
        server.start()
        assert await objects.get("kept", 4) == b"kept"
        await objects.put_file("a", files / "source")


async def test_a_server_killed_under_a_large_upload(no_identity, files, monkeypatch):
    (files / "source").write_bytes(bytes(200 << 20))
    async with s3_server() as server:
        for name, value in server.keys.items():
            monkeypatch.setenv(name, value)
        objects = await open_objects(server.url())
        upload = asyncio.ensure_future(objects.put_file("a", files / "source"))
        multipart = server.files / ".sgwtmp/multipart"
        await asyncio.to_thread(until, lambda: any(p.is_file() for p in multipart.rglob("*")))
        server.kill()
        await refused(upload, "store_unavailable")
        server.start()
        assert await objects.head("a") is None
        await objects.put_file("a", files / "source")
        assert (await objects.head("a")).size == 200 << 20


async def test_a_killed_writer_leaves_no_object(s3_keys, files):
    (files / "source").write_bytes(bytes(200 << 20))
    url = s3_keys.url("killed")
    script = "import sys; from agentenv._core import Objects; Objects(sys.argv[1]).put_file('a', sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", script, url, files / "source"])
    multipart = s3_keys.files / ".sgwtmp/multipart"
    until(lambda: any(path.is_file() for path in multipart.rglob("*")))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    objects = await open_objects(url)
    assert await objects.list("") == []
    assert await objects.sweep_drafts() == 0


async def test_a_full_server_is_told_as_such(no_identity, files, monkeypatch):
    async with mounted("tmpfs", "tmpfs", ("size=8m",)) as folder, s3_server(folder) as server:
        for name, value in server.keys.items():
            monkeypatch.setenv(name, value)
        objects = await open_objects(server.url())
        await objects.put("kept", b"kept")
        await refused(objects.put("big", bytes(9 << 20)), "disk_full")
        await refused(objects.put_file("big", files / "source"), "disk_full")
        assert [entry.key for entry in await objects.list("")] == ["kept"]
        await objects.put("more", bytes(4 << 20))


async def test_the_server_of_the_tests_leaves_nothing():
    async with s3_server() as server:
        process, folder = server.process, server.folder.parent
        assert folder.is_dir() and process.poll() is None
    assert not folder.exists() and process.poll() is not None
