import io
import os
import tarfile

import pytest

from agentenv.errors import UserError
from agentenv.template import context as contexts
from agentenv.template.context import Context, Packed
from agentenv.template.instructions import FromContext


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "context"
    for name in ("app/a.py", "app/b.py", "app/in/c", "app/in/deep/d", "top.txt", "x y.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def wanted(*sources: str, dest: str = "/d", unpacks: bool = False) -> FromContext:
    return FromContext(sources, dest, "", "", unpacks, "\\", "COPY", 7)


def names(packed: Packed) -> list[str]:
    return [item.name for item in packed.items]


def archive(packed: Packed) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    contexts.write(packed.items, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return {info.name: info for info in tar}


@pytest.mark.parametrize(
    ("sources", "found", "source", "dest"),
    [
        (("top.txt",), ["top.txt"], "top.txt", "/d"),
        (("/top.txt",), ["top.txt"], "top.txt", "/d"),
        (("*.txt",), ["top.txt", "x y.txt"], ".", "/d/"),
        (("t*.txt",), ["top.txt"], "top.txt", "/d"),
        (("app/in",), [".", "c", "deep", "deep/d"], ".", "/d/"),
        (("app/in/", "top.txt"), [".", "c", "deep", "deep/d", "top.txt"], ".", "/d/"),
        (("app/*",), [".", "a.py", "b.py", "c", "deep", "deep/d"], ".", "/d/"),
        (("app/[^a].py",), ["b.py"], "b.py", "/d"),
        (("app/in/../a.py",), ["a.py"], "a.py", "/d"),
    ],
)
def test_sources_are_files_folders_contents_and_patterns(folder, sources, found, source, dest):
    packed = Context(folder).pack(wanted(*sources))
    assert names(packed) == found
    assert packed.step.args == (source, dest, "", "") and packed.step.keep_owner


def test_the_whole_context(folder):
    packed = Context(folder).pack(wanted("."))
    assert names(packed)[:3] == [".", "app", "app/a.py"] and "x y.txt" in names(packed)


def test_what_is_ignored_is_not_there(folder):
    ignore = ["# comment", "", "app/in", "!app/in/deep", "*.txt"]
    context = Context(folder, ignore)
    assert names(context.pack(wanted("app"))) == [".", "a.py", "b.py", "in/deep", "in/deep/d"]
    with pytest.raises(UserError, match=r"line 7: top.txt is not in.*dockerignore"):
        context.pack(wanted("top.txt"))
    with pytest.raises(UserError):
        Context(folder, ["[z-a"])


def test_the_dockerfiles_own_ignore_file_comes_first(folder):
    (folder / ".dockerignore").write_text("app\n")
    (folder / "other.Dockerfile").write_text("")
    (folder / "other.Dockerfile.dockerignore").write_text("top.txt\n")
    plain = Context.open(folder, folder / "Dockerfile")
    own = Context.open(folder, folder / "other.Dockerfile")
    assert "app" not in names(plain.pack(wanted("."))) and "app" in names(own.pack(wanted(".")))


@pytest.mark.parametrize("source", ["none", "app/none*", "../x", "/../../etc/passwd", "top.txt/x"])
def test_what_is_not_in_the_context_is_named(folder, source):
    with pytest.raises(UserError, match="Dockerfile line 7"):
        Context(folder).pack(wanted(source))


def test_links_are_followed_at_the_top_and_kept_below(folder, tmp_path):
    (folder / "link").symlink_to("app/in")
    (folder / "app" / "up").symlink_to("../top.txt")
    context = Context(folder)
    assert names(context.pack(wanted("link"))) == [".", "c", "deep", "deep/d"]
    assert archive(context.pack(wanted("app")))["up"].linkname == "../top.txt"
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to("../secret")
    (folder / "gone").symlink_to("nowhere")
    for name in ("out", "gone"):
        with pytest.raises(UserError, match="line 7"):
            context.pack(wanted(name))


def test_archives_hold_roots_files_with_their_modes(folder):
    (folder / "top.txt").chmod(0o751)
    info = archive(Context(folder).pack(wanted("top.txt")))["top.txt"]
    assert (info.uid, info.gid, info.uname, info.mode & 0o777) == (0, 0, "", 0o751)


def test_add_unpacks_archives_and_nothing_else(folder):
    with tarfile.open(folder / "some.tgz", "w:gz") as tar:
        tar.add(folder / "top.txt", "inner/top")
    context = Context(folder)
    assert names(context.pack(wanted("some.tgz"))) == ["some.tgz"]
    packed = context.pack(wanted("some.tgz", unpacks=True))
    assert packed.step.args[:2] == (".", "/d/") and list(archive(packed)) == ["inner/top"]
    assert names(context.pack(wanted("top.txt", unpacks=True))) == ["top.txt"]


def test_the_hash_is_of_names_modes_and_content(folder):
    context = Context(folder)

    def digest() -> str | None:
        return context.pack(wanted("app")).step.files

    first = digest()
    os.utime(folder / "app/a.py", (1, 1))
    assert digest() == first
    (folder / "app/a.py").chmod(0o700)
    second = digest()
    (folder / "app/a.py").write_text("other")
    third = digest()
    (folder / "app/a.py").rename(folder / "app/z.py")
    assert len({first, second, third, digest()}) == 4
