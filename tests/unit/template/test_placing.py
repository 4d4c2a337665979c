import io
import tarfile

import pytest

from agentenv.errors import UserError
from agentenv.template import placing
from agentenv.template.placing import clean, file_names, move, plan


def archive(*entries: tuple, mode: str = "w") -> io.BytesIO:
    """``(name, content or None for a folder or ("->", target) or ("=", target))``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.PAX_FORMAT) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.uid, info.gid, info.mode = 501, 20, 0o600
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, tuple):
                info.type = tarfile.SYMTYPE if content[0] == "->" else tarfile.LNKTYPE
                info.linkname = content[1]
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    out.seek(0)
    return out


def moved(source: io.BytesIO, place: placing.Placing, owner=None, mode=None) -> dict:
    out = io.BytesIO()
    move(source, out, place, owner=owner, mode=mode)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return {
            info.name: (tar.extractfile(info).read() if info.isreg() else info.linkname, info)
            for info in tar
        }


def names(*entries: tuple, source: str, dest: str, exists: bool = False) -> list[str]:
    found = archive(*entries)
    files = file_names(found) if placing.is_pattern(source) else []
    found.seek(0)
    return list(moved(found, plan(source, dest, exists=exists, files=files)))


TREE = (("app", None), ("app/a", b"1"), ("app/in", None), ("app/in/b", b"2"))


@pytest.mark.parametrize(
    ("source", "dest", "exists", "wanted"),
    [
        ("app", "/x", False, ["x", "x/a", "x/in", "x/in/b"]),
        ("app/", "/x/", True, ["x/a", "x/in", "x/in/b"]),
        ("./app", "/", True, ["a", "in", "in/b"]),
        ("app/in", "/x", False, ["x", "x/b"]),
        ("app/a", "/x", False, ["x"]),
        ("app/a", "/x", True, ["x/a"]),
        ("app/a", "/x/", False, ["x/a"]),
        (".", "/x", False, ["x/app", "x/app/a", "x/app/in", "x/app/in/b"]),
        ("none", "/x", False, []),
    ],
)
def test_folders_merge_and_files_go_in_or_become(source, dest, exists, wanted):
    assert names(*TREE, source=source, dest=dest, exists=exists) == wanted


@pytest.mark.parametrize(
    ("entries", "source", "dest", "wanted"),
    [
        ((("a.py", b""), ("b.py", b"")), "*.py", "/x", ["x/a.py", "x/b.py"]),
        ((("a.py", b""),), "*.py", "/x", ["x"]),
        ((("a.py", b""),), "*.py", "/x/", ["x/a.py"]),
        (TREE, "app/*", "/x", ["x/a", "x/in", "x/in/b"]),
        ((("d", None), ("d/a", b""), ("e/b", b"")), "[d-f]/*", "/x", ["x/d", "x/d/a", "x/e/b"]),
    ],
)
def test_patterns_keep_what_is_below_their_fixed_part(entries, source, dest, wanted):
    assert names(*entries, source=source, dest=dest) == wanted


def test_the_root_of_an_archive_becomes_the_folder():
    entries = ((".", None), ("./a", b"1"))
    assert names(*entries, source=".", dest="/x/") == ["x", "x/a"]
    assert names(*entries, source=".", dest="/x/", exists=True) == ["x/a"]


def test_owners_and_modes_are_kept_or_given():
    place = plan("app", "/x", exists=False)
    kept = moved(archive(*TREE), place)["x/a"][1]
    assert (kept.uid, kept.gid, kept.mode) == (501, 20, 0o600)
    given = moved(archive(*TREE, ("app/l", ("->", "a"))), place, owner=(7, 8), mode=0o755)
    assert (given["x/a"][1].uid, given["x/a"][1].gid, given["x/a"][1].mode) == (7, 8, 0o755)
    assert given["x/l"][0] == "a" and given["x/l"][1].mode != 0o755


def test_links_go_with_what_they_mean():
    entries = (*TREE, ("app/hard", ("=", "app/a")), ("app/soft", ("->", "/etc/passwd")))
    found = moved(archive(*entries), plan("app", "/x", exists=False))
    assert found["x/hard"][0] == "x/a" and found["x/soft"][0] == "/etc/passwd"
    with pytest.raises(UserError, match="not copied with it"):
        moved(archive(("a", b""), ("app/h", ("=", "a"))), plan("app", "/x", exists=False))


def test_long_names_and_compressed_archives_come_through():
    name = "app/" + "d" * 120 + "/" + "ü" * 90
    found = moved(archive((name, b"x" * 100_000), mode="w:gz"), plan("app", "/y", exists=False))
    assert found["y/" + name[4:]][0] == b"x" * 100_000


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x"])
def test_names_that_lead_out_are_refused(name):
    with pytest.raises(UserError) as caught:
        moved(archive((name, b"")), plan(".", "/x", exists=False))
    assert caught.value.code == "bad_archive"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nothing of the kind" * 100,
        archive(("app", b"x" * 9000)).read()[:5000],
        archive(("app", b"x" * 9000), mode="w:gz").read()[:60],
    ],
)
def test_what_is_no_archive_is_refused(data):
    with pytest.raises(UserError) as caught:
        moved(io.BytesIO(data), plan("app", "/x", exists=False))
    assert caught.value.code == "bad_archive"


def test_names_are_cleaned():
    assert [clean(name) for name in ("./a/./b/", "a//b", ".", "")] == ["a/b", "a/b", "", ""]
