"""The catalog over a real store: sharing, determinism, removal, several processes, full disks."""

import asyncio
import shutil
import sys

import pytest
from tests import corpus

from agentenv.errors import Conflict, ImageError, InfraError, NotFound, UserError
from agentenv.host.mount import mounted
from agentenv.image.registry import RegistrySettings
from agentenv.layer import convert
from agentenv.layer.catalog import ImageCatalog
from agentenv.layer.verify import verify
from agentenv.store.directory import DirectoryBlobs
from agentenv.store.sql import SqlRecords
from agentenv.template.named import name_image

A = corpus.Layer("gzip").folder("etc").add("etc/a", data=corpus.noise(9000))
B = corpus.Layer("zstd").add("b", data=corpus.noise(20_000, 2))


@pytest.fixture
def layouts(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    corpus.write(one, [A, B])
    corpus.write(two, [A, corpus.Layer().add("own")])
    return f"oci:{one}", f"oci:{two}"


async def test_images_share_the_layers_they_have_in_common(catalog, blobs, layouts):
    first = await catalog.pull(layouts[0])
    before = await blobs.keys()
    second = await catalog.pull(layouts[1])
    new = await blobs.keys() - before
    assert {key.split("/")[0] for key in new} == {"data", "tree", "meta"} and len(new) == 3
    common = set(await catalog.segments(first.id)) & set(await catalog.segments(second.id))
    assert len(common) == 1


async def test_the_same_input_gives_the_same_bytes(layouts, tmp_path):
    contents = []
    for number in range(2):
        home = tmp_path / f"home{number}"
        home.mkdir()
        records = await SqlRecords.open_sqlite(home / "state.db")
        blobs = DirectoryBlobs(home / "blobs")
        catalog = ImageCatalog(home, blobs, records, RegistrySettings())
        await catalog.pull(layouts[0])
        contents.append({k: (await blobs.path(k)).read_bytes() for k in await blobs.keys()})
        await records.close()
    assert contents[0] == contents[1]


async def test_many_pulls_at_once_convert_each_layer_once(catalog, blobs, layouts, monkeypatch):
    converted = []
    real = convert.convert

    async def counted(store, diff_id, *rest):
        converted.append(diff_id)
        await real(store, diff_id, *rest)

    monkeypatch.setattr(convert, "convert", counted)
    images = await asyncio.gather(*(catalog.pull(layouts[n % 2]) for n in range(8)))
    assert len({image.id for image in images}) == 2
    assert len(converted) == len(set(converted)) == 3


async def test_two_processes_pull_into_one_home(layouts, tmp_path):
    home = tmp_path / "home"
    aenv = shutil.which("aenv", path=str(sys.executable).rpartition("/")[0])
    both = [
        await asyncio.create_subprocess_exec(aenv, "image", "pull", layout, "--home", home)
        for layout in layouts
    ]
    assert [await child.wait() for child in both] == [0, 0]
    records = await SqlRecords.open_sqlite(home / "state.db")
    assert len(await records.images()) == 2
    await records.close()
    assert not list((home / "blobs/drafts").iterdir())


async def test_removing_deletes_what_nobody_else_needs(catalog, blobs, layouts):
    first, second = [await catalog.pull(layout) for layout in layouts]
    await catalog.remove(first.id)
    assert await verify(blobs, second, catalog.settings)
    await catalog.remove(second.reference)
    assert await blobs.keys() == set()
    with pytest.raises(NotFound):
        await catalog.find(first.id)


async def test_an_image_in_use_stays(catalog, records, layouts):
    image = await catalog.pull(layouts[0])
    await name_image(records, image.id, "base")
    with pytest.raises(Conflict) as caught:
        await catalog.remove(image.id)
    assert caught.value.code == "image_in_use"
    assert await catalog.segments(image.id)


async def test_images_are_found_by_id_its_beginning_and_reference(catalog, layouts):
    image = await catalog.pull(layouts[0])
    for key in (image.id, image.id[:6], layouts[0]):
        assert (await catalog.find(key)).id == image.id
    for key in ("none", image.id[:3], "oci:/nowhere"):
        with pytest.raises(NotFound):
            await catalog.find(key)


async def test_a_reference_means_its_newest_image(catalog, layouts, tmp_path):
    old = await catalog.pull(layouts[0])
    shutil.rmtree(tmp_path / "one")
    corpus.write(tmp_path / "one", [B])
    new = await catalog.pull(layouts[0])
    assert (await catalog.find(layouts[0])).id == new.id != old.id
    assert (await catalog.find(old.id)).digest == old.digest


async def test_a_request_from_afar_cannot_name_the_servers_files(catalog, layouts):
    with pytest.raises(UserError):
        await catalog.pull_remote(layouts[0])


async def test_an_image_without_layers_is_an_empty_root(catalog, blobs, tmp_path):
    corpus.write(tmp_path / "empty", [])
    image = await catalog.pull(f"oci:{tmp_path / 'empty'}")
    assert (await verify(blobs, image, catalog.settings)).entries == 1


async def test_a_missing_blob_is_told_and_pulled_again(catalog, blobs, layouts):
    image = await catalog.pull(layouts[0])
    for path in await catalog.segments(image.id):
        path.unlink()
    with pytest.raises(ImageError) as caught:
        await catalog.segments(image.id)
    assert caught.value.code == "image_incomplete"
    await catalog.pull(layouts[0])
    assert (await verify(blobs, image, catalog.settings)).differences == ()


@pytest.mark.parametrize("size", ["40k", "120k", "300k"])
async def test_a_full_disk_is_told_and_leaves_nothing(layouts, records, size):
    async with mounted("tmpfs", "tmpfs", (f"size={size}",)) as folder:
        blobs = DirectoryBlobs(folder / "blobs")
        big = corpus.Layer("gzip").add("big", data=corpus.noise(500_000))
        source = folder.with_name(folder.name + "-source")
        corpus.write(source, [A, big])
        try:
            catalog = ImageCatalog(folder, blobs, records, RegistrySettings())
            with pytest.raises(InfraError) as caught:
                await catalog.pull(f"oci:{source}")
            assert (caught.value.code, caught.value.http_status) == ("disk_full", 507)
            assert not await blobs.keys() and not list(folder.glob("blobs/drafts/*"))
            assert not await records.images()
        finally:
            shutil.rmtree(source)


async def test_verify_finds_a_flipped_bit_and_a_changed_source(catalog, blobs, layouts, tmp_path):
    image = await catalog.pull(layouts[0])
    good = await verify(blobs, image, catalog.settings)
    assert good.differences == () and good.source == "the same" and good.entries == 4
    path = (await catalog.segments(image.id))[1]
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "one")
    bad = await verify(blobs, image, catalog.settings)
    assert [(d.path, d.what) for d in bad.differences] == [("/etc/a", "sha256")]
    assert bad.source.startswith("not compared")
    corpus.write(tmp_path / "one", [A, B])
    with pytest.raises(ImageError) as caught:
        await verify(blobs, image, catalog.settings)
    assert caught.value.code == "layer_damaged"
