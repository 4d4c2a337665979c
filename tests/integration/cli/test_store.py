"""`aenv store …` as a command, and images that homes share through one store."""

import json
import os
import shutil
import subprocess

import pytest
from tests import corpus
from tests.server import AENV


@pytest.fixture
def layout(tmp_path):
    layers = [
        corpus.Layer("gzip").folder("etc").add("etc/a", data=corpus.noise(300_000)),
        corpus.Layer("zstd").add("b", data=corpus.noise(200_000, 2)),
    ]
    corpus.write(tmp_path / "layout", layers)
    return f"oci:{tmp_path / 'layout'}"


@pytest.fixture
def aenv(tmp_path):
    def run(home, *words, status=0):
        environ = {
            **os.environ,
            "AENV_HOME": str(tmp_path / home),
            "AENV_STORE": str(tmp_path / "store"),
        }
        done = subprocess.run([*AENV, *words], capture_output=True, text=True, env=environ)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else done.stdout

    return run


def test_a_second_home_takes_an_image_as_it_is(aenv, layout, tmp_path):
    image = aenv("one", "image", "pull", layout)
    packs = sorted((tmp_path / "store/pack").glob("*/*"))
    [seen] = aenv("two", "image", "ls", "--store")
    assert seen["id"] == image["id"] and aenv("two", "image", "ls") == []
    taken = aenv("two", "image", "pull", f"store:{image['id']}", "--name", "app")
    assert taken["parts"] == image["parts"] and taken["reference"] == image["reference"]
    assert sorted((tmp_path / "store/pack").glob("*/*")) == packs
    assert not list((tmp_path / "two/cache").glob("*/*.data"))
    assert aenv("two", "image", "pull", layout)["id"] == image["id"]  # found by its digest
    assert aenv("two", "image", "verify", "app")["differences"] == []
    aenv("one", "image", "rm", image["id"])
    assert aenv("two", "image", "verify", "app")["differences"] == []
    aenv("two", "image", "rm", "app")
    assert not [f for _, _, files in os.walk(tmp_path / "store") for f in files]


def test_what_is_not_in_the_store_is_told(aenv):
    assert aenv("one", "image", "pull", "store:" + "0" * 20, status=64) == ""
    assert aenv("one", "image", "pull", "store:nothing", status=64) == ""


def test_statistics_tell_what_sharing_saves(aenv, layout):
    aenv("one", "image", "pull", layout)
    alone = aenv("one", "store", "stats")
    assert alone["images"] == 1 and alone["cache_bytes"] > 500_000
    assert 500_000 < alone["logical_bytes"] < 600_000 and alone["stored_bytes"] > 500_000
    aenv("two", "image", "pull", layout)
    both = aenv("two", "store", "stats")
    assert both["images"] == 2 and both["logical_bytes"] == 2 * alone["logical_bytes"]
    assert both["unique_bytes"] == alone["unique_bytes"]
    assert both["saved_bytes"] > 400_000 and both["cache_bytes"] == 0


def test_damage_is_found_and_named(aenv, layout, tmp_path):
    aenv("one", "image", "pull", layout)
    good = aenv("one", "store", "verify")
    assert good["faults"] == [] and good["chunks"] > 2 and good["layers"] == 3
    largest = max((tmp_path / "store/pack").glob("*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[1000] ^= 1
    largest.chmod(0o600)
    largest.write_bytes(data)
    next(iter((tmp_path / "store/tree").glob("*/*"))).unlink()
    bad = aenv("one", "store", "verify", status=65)
    assert {fault["key"].partition("/")[0] for fault in bad["faults"]} == {"layer", "tree"}
    assert all("image-" in fault["needed_by"][0] for fault in bad["faults"])


@pytest.mark.parametrize("kind", ["pack", "layer"])
def test_what_is_damaged_is_made_again(aenv, layout, tmp_path, kind):
    image = aenv("one", "image", "pull", layout)
    for path in (tmp_path / "store" / kind).glob("*/*"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
    assert aenv("one", "store", "verify", "--discard", status=65)["faults"]
    assert aenv("one", "image", "pull", layout)["parts"] == image["parts"]
    assert aenv("one", "store", "verify")["faults"] == []
    assert aenv("one", "image", "verify", image["id"])["differences"] == []


HOSTILE = [b"", b"[]", b"\xff\xfe", b'{"layer": "../../x", "blocks": 5}']
MORE_HOSTILE = [
    b"{", b"5", b'"x"', b"{}", b"[" * 3000, b'{"layer": null, "blocks": -7}', b'{"layer": 7}',
    b'{"reference": 1, "digest": 2, "config": {}, "diff_ids": 3, "parts": 4, "keys": 5}',
]  # fmt: skip


@pytest.mark.parametrize("kind", ["image", "source", "tree", "layer"])
@pytest.mark.parametrize(
    "content", [*HOSTILE, *(pytest.param(each, marks=pytest.mark.full) for each in MORE_HOSTILE)]
)
def test_hostile_objects_are_made_again(aenv, layout, tmp_path, kind, content):
    image = aenv("one", "image", "pull", layout)
    for path in (tmp_path / "store" / kind).glob("*/*"):
        path.chmod(0o600)
        path.write_bytes(content)
    aenv("one", "image", "ls", "--store")
    if kind == "tree":  # nothing tells it from what is right but a look inside
        assert "Traceback" not in str(aenv("two", "image", "pull", "dir:/nowhere", status=65))
        return
    assert aenv("two", "image", "pull", layout)["parts"] == image["parts"]
    assert aenv("two", "store", "verify")["faults"] == []


def test_a_copied_home_is_another_home(aenv, layout, tmp_path):
    aenv("one", "image", "pull", layout)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    corpus.write(tmp_path / "other", [corpus.Layer().add("c", data=corpus.noise(100_000, 3))])
    other = aenv("two", "image", "pull", f"oci:{tmp_path / 'other'}")
    aenv("one", "store", "gc")
    assert aenv("two", "image", "verify", other["id"])["differences"] == []
    for listed in aenv("one", "image", "ls"):
        aenv("one", "image", "rm", listed["id"])
    for listed in aenv("two", "image", "ls"):
        assert aenv("two", "image", "verify", listed["id"])["differences"] == []


def test_a_home_stays_with_its_store(tmp_path, layout):
    def aenv(*words, status=0, **environ):
        known = {k: v for k, v in os.environ.items() if not k.startswith("AENV_")}
        environ = {**known, "AENV_HOME": str(tmp_path / "home"), **environ}
        done = subprocess.run([*AENV, *words], capture_output=True, text=True, env=environ)
        assert done.returncode == status, done.stderr
        return done

    store = tmp_path / "elsewhere"
    aenv("image", "pull", layout, AENV_STORE=str(store))
    assert json.loads(aenv("store", "stats").stdout)["images"] == 1  # remembered
    refused = aenv("store", "stats", status=64, AENV_STORE=str(tmp_path / "third"))
    assert "store_differs" in refused.stderr
    store.rename(tmp_path / "away")
    assert "store_missing" in aenv("image", "ls", status=71).stderr
    assert not store.exists()


def test_a_cache_on_a_disk_of_its_own(aenv, layout, tmp_path):
    (tmp_path / "one/cache").mkdir(parents=True)
    words = ("-t", "tmpfs", "-o", "size=8m", "aenv-test", str(tmp_path / "one/cache"))
    subprocess.run(["mount", *words], check=True)
    try:
        aenv("one", "image", "pull", layout)
        assert aenv("one", "store", "stats")["cache_bytes"] > 400_000
    finally:
        subprocess.run(["umount", str(tmp_path / "one/cache")], check=True)


def test_a_dry_run_tells_and_does_nothing(aenv, layout, tmp_path):
    aenv("one", "image", "pull", layout)
    for claim in (tmp_path / "store/claim").glob("**/image-*"):
        claim.unlink()
    before = sorted(str(path) for path in (tmp_path / "store").glob("**/*") if path.is_file())
    planned = aenv("one", "store", "gc", "--dry-run")
    assert planned["deleted_bytes"] > 400_000
    assert sorted(str(p) for p in (tmp_path / "store").glob("**/*") if p.is_file()) == before
    assert aenv("one", "store", "gc")["deleted"] == planned["deleted"]
    assert aenv("one", "store", "gc")["deleted"] == []


def test_a_home_of_an_earlier_format_is_refused(aenv, tmp_path):
    import sqlite3

    aenv("one", "image", "ls")
    with sqlite3.connect(tmp_path / "one/state.db") as db:
        db.execute("UPDATE schema SET version = 1")
    aenv("one", "image", "ls", status=71)


@pytest.mark.parametrize("store", ["ftp://x", "s3://", "s3://user:secret@bucket", "relative"])
def test_a_store_that_cannot_be_is_refused(tmp_path, store):
    environ = {**os.environ, "AENV_HOME": str(tmp_path / "home"), "AENV_STORE": store}
    done = subprocess.run([*AENV, "image", "ls"], capture_output=True, text=True, env=environ)
    assert done.returncode == 64 and "Traceback" not in done.stderr
