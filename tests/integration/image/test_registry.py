"""Pulls from registries, real and faulty, into a real store."""

import asyncio
import json
import signal

import pytest
from tests import corpus
from tests.integration.image import registries
from tests.library import nothing_stored, opened

from agentenv.errors import ImageError, InfraError
from agentenv.image.reference import RegistryImage
from agentenv.image.registry import RegistrySettings, endpoints, is_loopback


async def test_a_real_registry(catalog, layout, tmp_path):
    with registries.real(tmp_path / "registry") as registry:
        registry.push(layout, "team/app", "v1")
        image = await catalog.pull(f"{registry.host}/team/app:v1")
        digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
        assert image.digest == digest
        assert (image.config.env, image.config.user) == (("A=b",), "1000:7")
        by_digest = await catalog.pull(f"{registry.host}/team/app@{digest}")
        assert by_digest.digest == digest and by_digest.id != image.id
        with pytest.raises(ImageError) as caught:
            await catalog.pull(f"{registry.host}/team/app:v2")
        assert (caught.value.code, caught.value.http_status) == ("image_not_found", 404)


async def test_a_real_registry_with_a_login(catalog, layout, tmp_path, no_login, library):
    with registries.real(tmp_path / "registry", auth=True) as registry:
        registry.push(layout, "app")
        with pytest.raises(ImageError) as caught:
            await catalog.pull(f"{registry.host}/app")
        assert caught.value.code == "image_denied" and "docker login" in caught.value.message
        assert await nothing_stored(library, tmp_path / "home")
        registries.docker_config(no_login, registry.host)
        assert (await catalog.pull(f"{registry.host}/app")).size > 1_000_000


async def test_layers_that_are_there_are_not_fetched_again(catalog, layout, tmp_path):
    other = tmp_path / "other"
    shared = [
        corpus.Layer("zstd").folder("etc").add("etc/one", data=b"1"),  # packed differently
        corpus.Layer("plain").add("own", data=b"mine"),
    ]
    corpus.write(other, shared)
    states = {}
    with registries.faulty(layout) as one, registries.faulty(other) as two:
        await catalog.pull(f"{one.host}/x")
        await catalog.pull(
            f"{two.host}/x", lambda digest, stage, *_: states.setdefault(digest, stage)
        )
    assert sorted(states.values()) == ["exists", "fetch"]
    assert len([path for path, _ in two.seen if "/blobs/" in path]) == 2  # configuration, one layer


async def test_a_token_is_asked_for_and_sent(catalog, layout):
    with registries.faulty(layout) as registry:
        registry.token = "abc"
        await catalog.pull(f"{registry.host}/x")
        assert [path for path, _ in registry.seen if path.startswith("/token")]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_registry_is_asked_again_when_it_says(catalog, layout, status):
    with registries.faulty(layout) as registry:
        registry.faults = {"manifests": [status], "blobs": [status, status]}
        registry.headers = {"Retry-After": "1"}
        begun = asyncio.get_running_loop().time()
        await catalog.pull(f"{registry.host}/x")
        assert asyncio.get_running_loop().time() - begun >= 2  # the waits asked for, not a speed


async def test_a_broken_download_goes_on_where_it_broke(catalog, layout):
    with registries.faulty(layout) as registry:
        registry.faults = {"blobs": [None, ("cut", 10), ("cut", 10), ("cut", 100_000), ("cut", 1)]}
        await catalog.pull(f"{registry.host}/x")
        assert [r for _, r in registry.seen if r]


async def test_a_registry_without_ranges_is_read_from_the_start(catalog, layout):
    with registries.faulty(layout) as registry:
        registry.headers = {"no-range": "1"}
        registry.faults = {"blobs": [None, ("cut", 30), ("cut", 30), ("cut", 500_000)]}
        await catalog.pull(f"{registry.host}/x")


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"blobs": [("replace", b"{}")]}, "digest_mismatch"),
        ({"blobs": [None, ("replace", b"x"), ("replace", b"x"), ("replace", b"x")] + [("replace", b"x")] * 40},
         "digest_mismatch"),
        ({"manifests": [("cut", 5)] * 9}, "registry_unreachable"),
        ({"manifests": [("replace", b"<html>")]}, "manifest_invalid"),
        ({"manifests": [("replace", b'{"schemaVersion": 1}')]}, "manifest_invalid"),
        ({"manifests": [403]}, "image_denied"),
        ({"manifests": [418]}, "registry_failed"),
        ({"blobs": [404]}, "image_not_found"),
    ],
)  # fmt: skip
async def test_what_a_registry_does_wrong_is_told_and_leaves_nothing(
    catalog, layout, library, tmp_path, faults, code, monkeypatch
):
    monkeypatch.setattr("agentenv.image.transport.FIRST_DELAY", 0.001)
    with registries.faulty(layout) as registry:
        registry.faults = faults
        with pytest.raises((ImageError, InfraError)) as caught:
            await catalog.pull(f"{registry.host}/x")
    assert caught.value.code == code
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_layer_of_the_right_size_and_wrong_content(catalog, layout, library, tmp_path):
    doc = json.loads((layout / "index.json").read_text())
    manifest = json.loads(registries.RealRegistry.blob(layout, doc["manifests"][0]["digest"]))
    largest = manifest["layers"][2]
    path = layout / "blobs" / largest["digest"].replace(":", "/")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with registries.faulty(layout) as registry, pytest.raises(ImageError) as caught:
        await catalog.pull(f"{registry.host}/x")
    assert caught.value.code == "digest_mismatch"
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_registry_killed_in_the_middle(catalog, layout, library, tmp_path, monkeypatch):
    monkeypatch.setattr("agentenv.image.transport.FIRST_DELAY", 0.01)
    big = tmp_path / "big"
    corpus.write(big, [corpus.Layer("plain").add("big", data=corpus.noise(80_000_000))])
    with registries.real(tmp_path / "registry") as registry:
        registry.push(big, "app")
        began = asyncio.Event()

        def report(_digest, stage, done, _total):
            if stage == "fetch" and done:
                began.set()

        registry.process.send_signal(signal.SIGSTOP)
        registry.process.send_signal(signal.SIGCONT)
        pull = asyncio.ensure_future(catalog.pull(f"{registry.host}/app", report))
        await asyncio.wait_for(began.wait(), 30)
        registry.kill()
        with pytest.raises(InfraError) as caught:
            await pull
    assert caught.value.code == "registry_unreachable"
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_cancelled_pull_leaves_nothing(catalog, layout, library, tmp_path):
    with registries.faulty(layout) as registry:
        registry.faults = {"blobs": [None, None, None, ("stall", 10)]}
        pull = asyncio.ensure_future(catalog.pull(f"{registry.host}/x"))
        await asyncio.to_thread(registry.stalled.wait, 30)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_mirror_is_asked_first_and_passed_over_when_it_fails(layout, tmp_path, monkeypatch):
    monkeypatch.setattr("agentenv.image.transport.FIRST_DELAY", 0.001)
    with registries.faulty(layout) as mirror, registries.faulty(layout) as own:
        mirrors = (f"{own.host}=http://{mirror.host}",)
        async with opened(tmp_path / "home", registry_mirrors=mirrors) as library:
            image = await library.catalog.pull(f"{own.host}/x")
            assert mirror.seen and not own.seen
            await library.catalog.remove(image.id)
            mirror.faults = {"manifests": [404], "blobs": [500] * 3}
            await library.catalog.pull(f"{own.host}/x")
            assert own.seen


async def test_a_foreign_platform_is_told(catalog, tmp_path):
    layout = tmp_path / "foreign"
    corpus.write(layout, [corpus.Layer().add("x")], architecture="s390x")
    with registries.faulty(layout) as registry, pytest.raises(ImageError) as caught:
        await catalog.pull(f"{registry.host}/x")
    assert caught.value.code == "image_platform" and "s390x" in caught.value.message


async def test_nobody_listens(catalog, monkeypatch):
    monkeypatch.setattr("agentenv.image.transport.FIRST_DELAY", 0.001)
    with pytest.raises(InfraError) as caught:
        await catalog.pull("127.0.0.1:1/x")
    assert caught.value.code == "registry_unreachable"


def test_plain_http_is_for_loopback_or_as_configured():
    settings = RegistrySettings(insecure=("plain.example:5000",))
    bases = {h: endpoints(h, settings)[-1].base for h in
             ("quay.io", "localhost:1", "127.0.0.9", "[::1]:5", "plain.example:5000", "docker.io")}  # fmt: skip
    assert bases["quay.io"] == "https://quay.io"
    assert bases["docker.io"] == "https://registry-1.docker.io"
    assert all(bases[h].startswith("http://") for h in bases if h not in ("quay.io", "docker.io"))
    assert is_loopback("localhost:5000") and not is_loopback("localhost.example")
    assert str(RegistryImage("localhost:1", "a", "b")) == "localhost:1/a:b"
