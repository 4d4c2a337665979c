import json

import pytest

from agentenv.errors import ImageError
from agentenv.image import manifest as m

D, E = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def doc(**changes):
    return {"schemaVersion": 2, "config": {"digest": D, "size": 3},
            "layers": [{"digest": E, "size": 5}], **changes}  # fmt: skip


def test_a_manifest():
    assert m.manifest(doc()) == m.Manifest(m.Descriptor(D, 3), (m.Descriptor(E, 5),))


@pytest.mark.parametrize(
    "bad",
    [doc(schemaVersion=1), doc(config={}), doc(config=None), doc(layers=[{"digest": "x"}]),
     doc(layers=7), doc(layers=[{"digest": E, "size": -1}]), doc(layers=[{"digest": E, "size": "x"}]),
     doc(layers=[{"digest": "sha512:" + "1" * 128, "size": 1}]),
     doc(layers=[{"digest": E, "size": 1}] * 2000)],
)  # fmt: skip
def test_what_is_wrong_is_told(bad):
    with pytest.raises(ImageError) as caught:
        m.manifest(bad)
    assert caught.value.code == "manifest_invalid"


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{" * 100_000, b"1" * (9 << 20)])
def test_what_is_no_json_object_is_told(data):
    with pytest.raises(ImageError):
        m.document(data)


def entry(architecture, digest=D, **more):
    return {"digest": digest, "platform": {"architecture": architecture, "os": "linux"}, **more}


def test_the_index_entry_of_this_architecture_is_chosen():
    offered = m.choices({"manifests": [entry("arm64"), entry("amd64", E)]})
    assert m.choose(offered, "amd64").digest == E


def test_a_single_unmarked_manifest_is_taken():
    assert m.choose(m.choices({"manifests": [{"digest": D}]}), "amd64").digest == D


def test_a_foreign_platform_names_what_there_is():
    offered = m.choices({"manifests": [entry("arm64"), entry("s390x"), entry("unknown")]})
    with pytest.raises(ImageError) as caught:
        m.choose(offered, "amd64")
    assert caught.value.code == "image_platform"
    assert "linux/arm64, linux/s390x" in caught.value.message


def config(**changes):
    return {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [D]}, **changes}


def test_a_configuration_is_kept():
    found = m.configuration(
        config(config={"Env": ["A=b"], "User": "u:g", "WorkingDir": "/w", "Entrypoint": ["e"],
                       "Cmd": "echo hi", "Labels": {"l": "1"}, "ExposedPorts": {"80/tcp": {}},
                       "Volumes": {"/v": {}}}), 1, "amd64",
    )  # fmt: skip
    image = found.image
    assert (image.env, image.user, image.working_dir) == (("A=b",), "u:g", "/w")
    assert (image.entrypoint, image.cmd) == (("e",), ("/bin/sh", "-c", "echo hi"))
    assert (image.labels, image.exposed_ports, image.volumes) == ({"l": "1"}, ("80/tcp",), ("/v",))
    assert found.diff_ids == (D,)


def test_nulls_are_as_absent():
    found = m.configuration(config(config={"Env": None, "Cmd": None, "Labels": None}), 1, "amd64")
    assert found.image.env == found.image.cmd == () and found.image.labels == {}


@pytest.mark.parametrize(
    ("bad", "code"),
    [(config(architecture="arm64"), "image_platform"), (config(os="windows"), "image_platform"),
     (config(rootfs={"diff_ids": []}), "manifest_invalid"), (config(rootfs=None), "manifest_invalid"),
     (config(config=[1]), "manifest_invalid")],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(bad, code):
    with pytest.raises(ImageError) as caught:
        m.configuration(json.loads(json.dumps(bad)), 1, "amd64")
    assert caught.value.code == code
