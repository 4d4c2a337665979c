"""The catalog over a real store: sharing, determinism, removal, several processes, full disks."""

import asyncio
import shutil
import sys

import pytest
from tests import corpus
from tests.library import nothing_stored, opened, stored

from agentenv.errors import Conflict, ImageError, InfraError, NotFound, UserError
from agentenv.host.mount import mounted
from agentenv.layer import convert
from agentenv.layer.verify import verify
from agentenv.template.named import name_image

A = corpus.Layer("gzip").folder("etc").add("etc/a", data=corpus.noise(9000))
B = corpus.Layer("zstd").add("b", data=corpus.noise(20_000, 2))


@pytest.fixture
def layouts(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    corpus.write(one, [A, B])
    corpus.write(two, [A, corpus.Layer().add("own")])
    return f"oci:{one}", f"oci:{two}"


async def test_images_share_the_layers_they_have_in_common(catalog, library, layouts):
    first = await catalog.pull(layouts[0])
    before = await stored(library)
    second = await catalog.pull(layouts[1])
    new = sorted(key.split("/")[0] for key in await stored(library) - before)
    made = ["layer", "pack", "source", "source", "tree"]  # metadata, and a layer without data
    assert new == sorted(["claim", "image", *made])
    assert len(set(first.parts) & set(second.parts)) == 1


async def test_the_same_input_gives_the_same_bytes(layouts, tmp_path):
    contents = []
    for number in range(2):
        home = tmp_path / f"home{number}"
        async with opened(home) as library:
            await library.catalog.pull(layouts[0])
            objects = library.layers.objects
            keys = [key for key in await stored(library) if not key.startswith("claim/")]
            contents.append({key: await objects.get(key, 1 << 30) for key in keys})
    assert contents[0] == contents[1]


async def test_many_pulls_at_once_convert_each_layer_once(catalog, library, layouts, monkeypatch):
    converted = []
    real = convert.convert

    async def counted(store, diff_id, *rest):
        converted.append(diff_id)
        return await real(store, diff_id, *rest)

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
    async with opened(home) as library:
        assert len(await library.records.images()) == 2
    assert not list((home / "drafts").iterdir())


async def test_removing_deletes_what_nobody_else_needs(catalog, library, layouts):
    first, second = [await catalog.pull(layout) for layout in layouts]
    await catalog.remove(first.id)
    assert not (await verify(library.layers, second, catalog.settings)).differences
    await catalog.remove(second.reference)
    assert await stored(library) == set()
    with pytest.raises(NotFound):
        await catalog.find(first.id)


async def test_an_image_in_use_stays(catalog, library, records, layouts):
    image = await catalog.pull(layouts[0])
    await name_image(records, image.id, "base")
    with pytest.raises(Conflict) as caught:
        await catalog.remove(image.id)
    assert caught.value.code == "image_in_use"
    assert f"layer/{image.parts[0].layer}" in await stored(library)


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


async def test_an_image_without_layers_is_an_empty_root(catalog, library, tmp_path):
    corpus.write(tmp_path / "empty", [])
    image = await catalog.pull(f"oci:{tmp_path / 'empty'}")
    assert (await verify(library.layers, image, catalog.settings)).entries == 1


@pytest.mark.parametrize("kind", ["layer", "pack", "tree", "source", "image"])
async def test_what_went_missing_is_told_and_pulled_again(catalog, library, layouts, kind):
    image = await catalog.pull(layouts[0])
    lost = [key for key in await stored(library) if key.startswith(kind)]
    await library.layers.objects.delete(lost)
    if kind in ("layer", "tree"):
        with pytest.raises(ImageError) as caught:
            await verify(library.layers, image, catalog.settings)
        assert caught.value.code == "image_incomplete"
    again = await catalog.pull(layouts[0])
    assert again.parts == image.parts
    assert (await verify(library.layers, image, catalog.settings)).differences == ()


@pytest.mark.parametrize("size", ["40k", "120k", "300k"])
async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, size):
    async with mounted("tmpfs", "tmpfs", (f"size={size}",)) as folder:
        big = corpus.Layer("gzip").add("big", data=corpus.noise(500_000))
        source = folder.with_name(folder.name + "-source")
        corpus.write(source, [A, big])
        try:
            async with opened(tmp_path / "home", store=str(folder)) as library:
                with pytest.raises(InfraError) as caught:
                    await library.catalog.pull(f"oci:{source}")
                assert (caught.value.code, caught.value.http_status) == ("disk_full", 507)
                assert await nothing_stored(library, tmp_path / "home")
                assert not await library.records.images()
        finally:
            shutil.rmtree(source)


async def test_verify_finds_a_flipped_bit_and_a_changed_source(catalog, library, layouts, tmp_path):
    image = await catalog.pull(layouts[0])
    good = await verify(library.layers, image, catalog.settings)
    assert good.differences == () and good.source == "the same" and good.entries == 4
    shutil.rmtree(tmp_path / "one")
    gone = await verify(library.layers, image, catalog.settings)
    assert gone.differences == () and gone.source.startswith("not compared")
    pack = (await library.layers.table(image.parts[1].layer)).packs[0]
    data = bytearray(await library.layers.objects.get(f"pack/{pack}", 1 << 30))
    data[100] ^= 1
    await library.layers.objects.put(f"pack/{pack}", bytes(data))
    with pytest.raises(InfraError) as caught:
        await verify(library.layers, image, catalog.settings)
    assert caught.value.code == "layer_damaged"
