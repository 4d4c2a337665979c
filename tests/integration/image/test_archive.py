"""OCI layouts, their archives, and what `docker save` writes."""

import gzip
import hashlib
import io
import json
import tarfile

import pytest
from tests import corpus
from tests.library import nothing_stored, stored

from agentenv.errors import ImageError


def tar_of(folder):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, ".")
    return out.getvalue()


def docker_save(path, layers, tags=("app:1",), *, linked=False):
    """As Docker before 25: a JSON list, a configuration, a layer file per layer."""
    diff_ids = ["sha256:" + hashlib.sha256(layer.tar()).hexdigest() for layer in layers]
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/x"]},
                         "rootfs": {"diff_ids": diff_ids}}).encode()  # fmt: skip
    names = [f"l{n}/layer.tar" for n in range(len(layers))]
    manifest = [{"Config": "c.json", "RepoTags": [tag], "Layers": names} for tag in tags]
    with tarfile.open(path, "w") as archive:

        def put(name, data):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

        put("c.json", config)
        for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
            if linked and number:  # a repeated layer was written as a link to the first
                member = tarfile.TarInfo(name)
                member.type, member.linkname = tarfile.SYMTYPE, "../l0/layer.tar"
                archive.addfile(member)
            else:
                put(name, layer.tar())
        put("manifest.json", json.dumps(manifest).encode())


LAYERS = [corpus.Layer("plain").add("a", data=b"1"), corpus.Layer("plain").add("b", data=b"2")]


async def test_a_layout_by_tag_and_alone(catalog, layout, tmp_path):
    only = await catalog.pull(f"oci:{layout}")
    named = await catalog.pull(f"oci:{layout}:latest")
    assert only.digest == named.digest and only.config.cmd == ("/bin/x",)
    corpus.write(layout, LAYERS, tag="other")
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"oci:{layout}")
    assert caught.value.code == "image_ambiguous" and "latest, other" in caught.value.message
    assert (await catalog.pull(f"oci:{layout}:other")).digest != only.digest
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"oci:{layout}:none")
    assert caught.value.code == "image_not_found"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
async def test_an_archive_of_a_layout(catalog, layout, tmp_path, pack):
    path = tmp_path / "image.tar"
    path.write_bytes(pack(tar_of(layout)))
    image = await catalog.pull(f"oci-archive:{path}")
    assert image.digest == (await catalog.pull(f"oci:{layout}")).digest


async def test_docker_save(catalog, tmp_path):
    path = tmp_path / "saved.tar"
    docker_save(path, LAYERS)
    image = await catalog.pull(f"docker-archive:{path}")
    assert image.config.cmd == ("/x",)
    assert (await catalog.pull(f"docker-archive:{path}:app:1")).digest == image.digest


async def test_docker_save_with_a_layer_twice(catalog, tmp_path):
    path = tmp_path / "saved.tar"
    docker_save(path, [LAYERS[0], LAYERS[0]], linked=True)
    assert len((await catalog.pull(f"docker-archive:{path}")).diff_ids) == 2


async def test_docker_save_of_several(catalog, tmp_path):
    path = tmp_path / "saved.tar"
    docker_save(path, LAYERS, ("a:1", "b:1"))
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"docker-archive:{path}")
    assert caught.value.code == "image_ambiguous"
    assert await catalog.pull(f"docker-archive:{path}:b:1")


async def test_layers_are_shared_over_all_forms(catalog, layout, library, tmp_path):
    corpus.write(layout, LAYERS, tag="two")
    await catalog.pull(f"oci:{layout}:two")
    keys = {key for key in await stored(library) if not key.startswith(("claim/", "image/"))}
    docker_save(tmp_path / "saved.tar", LAYERS)
    await catalog.pull(f"docker-archive:{tmp_path / 'saved.tar'}")
    new = {key.partition("/")[0] for key in await stored(library) - keys}
    assert new == {"claim", "image"}


def damage(layout, part):
    doc = json.loads((layout / "index.json").read_text())
    digest = doc["manifests"][0]["digest"]
    if part != "manifest":
        manifest = json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())
        digest = (manifest["config"] if part == "config" else manifest["layers"][1])["digest"]
    return layout / "blobs" / digest.replace(":", "/")


@pytest.mark.parametrize("part", ["manifest", "config", "layer"])
@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
async def test_damage_is_told_and_leaves_nothing(catalog, layout, library, tmp_path, part, how):
    path = damage(layout, part)
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-3] if how == "cut" else b"X" + data[1:])
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"oci:{layout}")
    assert caught.value.code == ("archive_invalid" if how == "missing" else "digest_mismatch")
    assert await nothing_stored(library, tmp_path / "home")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8bgarbage"])
@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
async def test_what_is_no_archive(catalog, library, tmp_path, content, kind):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ImageError):
        await catalog.pull(f"{kind}:{path}")
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_layer_that_is_not_what_the_configuration_names(catalog, library, tmp_path):
    path = tmp_path / "saved.tar"
    honest = corpus.Layer("plain").add("a", data=b"1")
    docker_save(path, [honest])
    other = corpus.Layer("plain").add("a", data=b"2").tar()
    path.write_bytes(path.read_bytes().replace(honest.tar(), other))
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"docker-archive:{path}")
    assert caught.value.code == "digest_mismatch"
    assert await nothing_stored(library, tmp_path / "home")


async def test_a_layout_cannot_name_files_outside(catalog, layout, tmp_path):
    (tmp_path / "index.json").write_text((layout / "index.json").read_text())
    (layout / "index.json").unlink()
    (layout / "index.json").symlink_to("../index.json")
    with pytest.raises(ImageError) as caught:
        await catalog.pull(f"oci:{layout}")
    assert caught.value.code == "archive_invalid"
