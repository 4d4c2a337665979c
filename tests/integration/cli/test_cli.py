"""Verbs that need no server."""

import asyncio
import json
import os
import pty
import subprocess
from datetime import UTC, datetime

import pytest
from tests import corpus
from tests.server import AENV

from agentenv import config
from agentenv.cli import VERBS
from agentenv.node.library import open_library
from agentenv.store.records import BuildRow, TemplateRow


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def layout(tmp_path):
    corpus.write(tmp_path / "layout", [corpus.Layer().add("a", data=b"1")], {"Cmd": ["/a"]})
    return f"oci:{tmp_path / 'layout'}"


def aenv(home, *words, status=0):
    done = subprocess.run(
        [*AENV, *words], capture_output=True, text=True, env={**os.environ, "AENV_HOME": str(home)}
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_an_image_from_pull_to_rm(home, layout):
    pulled = json.loads(aenv(home, "image", "pull", layout, "--name", "App:v1").stdout)
    assert pulled["reference"] == f"{layout}" and pulled["config"]["cmd"] == ["/a"]
    [listed] = json.loads(aenv(home, "image", "ls").stdout)
    assert listed["id"] == pulled["id"] and listed["names"] == ["app:v1"]
    shown = json.loads(aenv(home, "image", "inspect", "app:v1").stdout)
    assert shown["id"] == pulled["id"] and len(shown["parts"]) == 2
    verdict = json.loads(aenv(home, "image", "verify", pulled["id"]).stdout)
    assert verdict == {"entries": 2, "differences": [], "source": "the same"}
    assert pulled["id"] in aenv(home, "image", "rm", "app:v1").stdout
    assert json.loads(aenv(home, "image", "ls").stdout) == []
    assert not [f for _, _, files in os.walk(home / "store") for f in files]


def test_an_image_is_listed_with_a_template_that_has_no_name(home, layout):
    image = json.loads(aenv(home, "image", "pull", layout).stdout)
    template = TemplateRow("nameless", (), {}, datetime.now(UTC))
    build = BuildRow("b", template.id, image["id"], template.created)

    async def record() -> None:
        async with open_library(config.load({"home": home})) as library:
            await library.records.put_template(template)
            await library.records.put_build(build, ["default", "v2"])

    asyncio.run(record())
    [listed] = json.loads(aenv(home, "image", "ls").stdout)
    assert listed["names"] == ["nameless", "nameless:v2"]


def test_verify_fails_on_a_difference(home, layout):
    image = json.loads(aenv(home, "image", "pull", layout).stdout)
    for pack in (home / "store").glob("pack/*/*"):
        with pack.open("r+b") as file:
            file.seek(20)
            file.write(b"X")
    fault = aenv(home, "image", "verify", image["id"], status=71)
    assert "layer_damaged" in fault.stderr or json.loads(fault.stdout)["differences"]


@pytest.mark.parametrize(
    ("words", "status", "needle"),
    [
        (("image", "pull", "BAD REF"), 64, "no image reference"),
        (("image", "pull", "oci:/nowhere"), 65, "is no folder"),
        (("image", "pull", "oci:/nowhere", "--name", "Bad Name"), 64, "no template name"),
        (("image", "rm", "nothing"), 64, "not here"),
        (("image", "inspect", "nothing"), 64, "aenv image pull"),
        (("ls",), 64, "no API key"),
    ],
)
def test_errors_are_json_with_a_code_when_piped(home, words, status, needle):
    done = aenv(home, *words, status=status)
    fault = json.loads(done.stderr.splitlines()[-1])["error"]
    assert fault["code"] and needle in fault["message"]


def test_doctor_has_a_verdict_and_a_remedy_for_every_fact(home):
    done = subprocess.run([*AENV, "doctor", "--home", home], capture_output=True, text=True)
    findings = json.loads(done.stdout)
    assert {f["verdict"] for f in findings} <= {"ok", "warn", "fail"}
    assert all(f["remedy"] for f in findings if f["verdict"] != "ok")
    names = " ".join(f["name"] for f in findings).lower()
    for fact in (
        "kernel",
        "kvm",
        "memory",
        "disk",
        "cgroup",
        "qemu",
        "mmdebstrap",
        "addresses",
        "forwarding",
    ):
        assert fact in names, fact
    assert done.returncode == (1 if any(f["verdict"] == "fail" for f in findings) else 0)


def test_config_shows_what_holds_with_reasons(home):
    home.mkdir()
    (home / "config.toml").write_text("memory_mib = 1024\n")
    shown = aenv(home, "config").stdout
    assert "memory_mib = 1024" in shown and "# MiB:" in shown
    (home / "config.toml").write_text("nonsense = 1\n")
    assert "nonsense" in aenv(home, "config", status=64).stderr


def test_a_terminal_gets_tables_and_sentences(home, layout):
    aenv(home, "image", "pull", layout)
    main, terminal = pty.openpty()
    subprocess.run([*AENV, "image", "ls", "--home", home], stdout=terminal, check=True,
                   env={**os.environ, "COLUMNS": "200", "TERM": "xterm"})  # fmt: skip
    os.close(terminal)
    text = os.read(main, 65536).decode()
    os.close(main)
    assert "REFERENCE" in text and "TEMPLATES" in text and not text.lstrip().startswith("[")


@pytest.mark.parametrize("words", [(verb,) for verb in VERBS if verb not in ("image", "store")] + [
    ("image", verb) for verb in ("pull", "ls", "inspect", "verify", "rm")
] + [("store", verb) for verb in ("stats", "verify", "gc")] + [("template", "build")])  # fmt: skip
def test_every_help_has_an_example(words):
    done = subprocess.run([*AENV, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout and "Example" in done.stdout
