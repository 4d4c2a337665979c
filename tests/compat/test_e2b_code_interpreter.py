"""The templates that come with AgentENV, made by command, as E2B's users have them."""

import json
from pathlib import Path

import pytest
from tests.leaks import nothing_left
from tests.server import ROOT, TestServer, new_home

pytestmark = pytest.mark.full  # minutes: two images are assembled from packages


@pytest.fixture(scope="module")
def shipping(scratch, any_engine):
    """A server with the templates, made without a name: all of them."""
    running = TestServer(new_home(scratch), environ={"AENV_ENGINE": any_engine})
    running.home.mkdir(mode=0o711)
    with nothing_left(running.home):
        running.start()
        try:
            running.cli("template", "init", check=True, timeout=1800)
            yield running
        finally:
            running.close()


def test_the_official_sdk_runs_code(shipping):
    python = ROOT / ".cache/venvs/e2b-code-interpreter/bin/python"
    script = Path(__file__).with_name("e2b_code_interpreter_flow.py")
    assert python.exists(), "run: make setup"
    shipping.hold(script.read_text().count("\n@step\n"), python, script)


def test_what_is_there_is_not_made_again(shipping):
    templates = shipping.api("GET", "/templates").json()
    images = json.loads(shipping.cli("image", "ls", check=True).stdout)
    done = shipping.cli("template", "init", "base", check=True)
    assert "CACHED" in done.stderr.decode() or "the build is ready" in done.stderr.decode()
    assert json.loads(shipping.cli("image", "ls", check=True).stdout) == images
    assert {each["templateID"] for each in shipping.api("GET", "/templates").json()} == {
        each["templateID"] for each in templates
    }


def test_an_unknown_one_is_refused(shipping):
    done = shipping.cli("template", "init", "node")
    assert done.returncode == 64
    assert "unknown_template" in done.stderr.decode()


def test_images_are_as_they_were_made(shipping):
    for name in ("base", "code-interpreter-v1"):
        rows = json.loads(shipping.cli("image", "ls", check=True).stdout)
        key = next(r["id"] for r in rows if r["reference"].startswith(f"shipped:{name}@"))
        shipping.cli("image", "verify", key, check=True, timeout=600)
