"""`aenv store …` as a command, and images that homes share through one store."""

import json
import os
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
