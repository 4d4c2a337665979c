from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import UserError
from agentenv.image.reference import DebianImage, LocalImage, RegistryImage, is_remote, parse

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("debian", RegistryImage("docker.io", "library/debian", "latest"), "debian:latest"),
        ("debian:12", RegistryImage("docker.io", "library/debian", "12"), "debian:12"),
        ("a/b", RegistryImage("docker.io", "a/b", "latest"), "a/b:latest"),
        ("docker.io/library/x:1", RegistryImage("docker.io", "library/x", "1"), "x:1"),
        ("index.docker.io/a/b:1", RegistryImage("docker.io", "a/b", "1"), "a/b:1"),
        ("localhost/x", RegistryImage("localhost", "x", "latest"), "localhost/x:latest"),
        ("localhost:5000/x/y:z", RegistryImage("localhost:5000", "x/y", "z"),
         "localhost:5000/x/y:z"),
        ("[::1]:5000/x", RegistryImage("[::1]:5000", "x", "latest"), "[::1]:5000/x:latest"),
        (f"quay.io/a/b/c:t@{D}", RegistryImage("quay.io", "a/b/c", "t", D), f"quay.io/a/b/c@{D}"),
        ("docker://h.example/i", RegistryImage("h.example", "i", "latest"), "h.example/i:latest"),
        ("oci:/d:tag", LocalImage("oci", Path("/d"), "tag"), "oci:/d:tag"),
        ("oci:/d", LocalImage("oci", Path("/d")), "oci:/d"),
        ("docker-archive:/f.tar:a/b:1", LocalImage("docker-archive", Path("/f.tar"), "a/b:1"),
         "docker-archive:/f.tar:a/b:1"),
        ("tar:/a:b.tar", LocalImage("tar", Path("/a:b.tar")), "tar:/a:b.tar"),
        ("debootstrap:bookworm", DebianImage("bookworm"), "debootstrap:bookworm"),
        ("debootstrap:sid+ab,b+c", DebianImage("sid", ("ab", "b+c")), "debootstrap:sid+ab,b+c"),
    ],
)  # fmt: skip
def test_every_form(text, expected, shown):
    assert parse(text) == expected
    assert str(expected) == shown
    assert parse(shown) == expected or expected.digest  # a digest's short form drops the tag


@pytest.mark.parametrize(
    "text",
    ["", "UPPER", "a/B", "x:bad tag", "x@sha256:short", "x@md5:" + "a" * 32, "h..x/../y", "-a/b:",
     "oci:", "tar:", "debootstrap:", "debootstrap:x+Y", "debootstrap:x+a;b", "debootstrap:--x",
     "debootstrap:s+-opt", "localhost:5000/", "a//b", "x:" + "t" * 129, "a b"],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_text(text):
    with pytest.raises(UserError) as caught:
        parse(text)
    assert caught.value.code == "invalid_reference"
    assert repr(text) in caught.value.message


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text):
    try:
        assert parse(str(parse(text)))
    except UserError:
        return


def test_paths_are_not_remote():
    assert is_remote("debian:12") and is_remote("debootstrap:sid")
    assert not is_remote("tar:/x")
