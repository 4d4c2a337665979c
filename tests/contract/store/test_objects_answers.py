"""Object stores in S3: servers that answer wrongly, or not at all. Played by the test."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentenv.errors import InfraError
from agentenv.store.objects import open_objects


@pytest.fixture(autouse=True)
def identity(no_identity, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")


def answer(status, body=b"", length=None, **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


OBJECT = {"ETag": '"1"', "Last_Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}


@asynccontextmanager
async def playing(reply):
    """A store whose server sends what ``reply(method, target, headers)`` gives; None is silence."""
    asked = []

    async def serve(reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            await reader.readexactly(int(headers.get("content-length", 0)))
            method, target, _ = first.split(" ")
            asked.append((method, target, headers))
            data = reply(method, target, headers)
            if data is None:
                await asyncio.sleep(60)
            writer.write(data)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        url = f"s3://bucket?endpoint=http://127.0.0.1:{port}&timeout=1"
        yield await open_objects(url), asked
    finally:
        server.close()


async def refused(awaitable, *codes):
    with pytest.raises(InfraError) as caught:
        await asyncio.wait_for(awaitable, 60)
    assert caught.value.code in codes, caught.value.message


async def test_a_server_that_never_answers_is_unavailable():
    async with playing(lambda *_: None) as (objects, _):
        await asyncio.gather(
            refused(objects.get("a", 1), "store_unavailable"),
            refused(objects.head("a"), "store_unavailable"),
            refused(objects.put("a", b"x"), "store_unavailable"),
            refused(objects.list(""), "store_unavailable"),
            refused(objects.delete(["a"]), "store_unavailable"),
        )


async def test_a_body_that_stops_is_unavailable():
    def stop(method, target, headers):
        return answer("200 OK", b"x" * 10, length=1000, **OBJECT)

    async with playing(stop) as (objects, _):
        await refused(objects.get("a", 1000), "store_unavailable", "store_damaged")


async def test_a_truncated_answer_is_no_short_data(tmp_path):
    def cut(method, target, headers):
        if "range" in headers:
            return answer("206 Partial", b"x" * 10, 500, Content_Range="bytes 0-499/1000", **OBJECT)
        return answer("200 OK", b"x" * 10, 1000, **OBJECT)

    async with playing(cut) as (objects, _):
        for call in (
            objects.get("a", 1000),
            objects.get_range("a", 0, 500),
            objects.get_to("a", tmp_path / "target"),
        ):
            await refused(call, "store_unavailable", "store_damaged")
    assert not list(tmp_path.glob("*target*"))


async def test_another_range_than_was_asked_for_is_refused():
    def other(method, target, headers):
        return answer("206 Partial", b"x" * 10, Content_Range="bytes 90-99/1000", **OBJECT)

    async with playing(other) as (objects, _):
        with pytest.raises(InfraError):
            await objects.get_range("a", 0, 10)


async def test_an_object_said_to_be_huge_is_not_read():
    def huge(method, target, headers):
        return answer("200 OK", b"x", 1 << 50, **OBJECT)

    async with playing(huge) as (objects, _):
        await refused(objects.get("a", 1 << 20), "store_damaged")


@pytest.mark.parametrize(
    ("status", "code", "tries"),
    [
        ("503 Slow Down", "store_unavailable", 3),
        ("500 Internal", "store_unavailable", 3),
        ("507 Insufficient Storage", "disk_full", 3),
        ("403 Forbidden", "store_denied", 1),
    ],
)
async def test_what_statuses_mean_and_how_often_is_tried(status, code, tries):
    async with playing(lambda *_: answer(status)) as (objects, asked):
        await refused(objects.get("a", 1), code)
        assert len(asked) == tries


async def test_a_server_without_conditions_is_asked_first():
    there = set()

    def reply(method, target, headers):
        if method == "HEAD":
            return answer("200 OK", **OBJECT) if target in there else answer("404 None")
        if "if-none-match" in headers:
            return answer("501 Not Implemented")
        there.add(target)
        return answer("200 OK", **OBJECT)

    async with playing(reply) as (objects, asked):
        assert await objects.put_new("a", b"x") is True
        assert await objects.put_new("a", b"x") is False
        conditional = [headers for _, _, headers in asked if "if-none-match" in headers]
        assert 1 <= len(conditional) <= 3  # found out once


async def test_a_server_without_bulk_delete_is_asked_one_by_one():
    deleted = set()

    def reply(method, target, headers):
        if method == "POST":
            return answer("405 Not Allowed")
        deleted.add(target)
        return answer("204 No Content")

    async with playing(reply) as (objects, _):
        await objects.delete(["a", "b", "c"])
    assert deleted == {"/bucket/a", "/bucket/b", "/bucket/c"}
