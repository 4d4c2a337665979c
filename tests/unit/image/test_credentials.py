import base64
import json
import os

import pytest

from agentenv.errors import InfraError, UserError
from agentenv.image.credentials import HUB_KEY, Credentials, find


def auth(user, secret):
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"

    def write(doc):
        path.write_text(doc if isinstance(doc, str) else json.dumps(doc))
        return path

    return write


@pytest.fixture
def helper(tmp_path, monkeypatch):
    def make(script):
        path = tmp_path / "docker-credential-test"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


@pytest.mark.parametrize("key", ["quay.io", "https://quay.io", "https://quay.io/v2/"])
async def test_each_spelling_of_a_host(config, key):
    path = config({"auths": {key: auth("u", "p:q")}})
    assert await find("quay.io", path) == Credentials("u", "p:q")


async def test_the_hub_and_others(config):
    path = config({"auths": {HUB_KEY: auth("u", "p"), "x": {"identitytoken": "t"}, "y": {}}})
    assert await find("docker.io", path) == Credentials("u", "p")
    assert await find("x", path) == Credentials("", "t", identity=True)
    assert await find("y", path) is None and await find("z", path) is None


async def test_nobody_logged_in(tmp_path):
    assert await find("x", tmp_path / "none") is None


async def test_a_helper_is_asked(config, helper):
    helper('read server; printf \'{"Username": "u", "Secret": "%s"}\' "$server"')
    path = config({"credsStore": "test"})
    assert await find("docker.io", path) == Credentials("u", HUB_KEY)
    assert await find("quay.io", path) == Credentials("u", "quay.io")


async def test_a_helper_that_knows_nothing(config, helper):
    helper("echo credentials not found in native keychain; exit 1")
    assert await find("quay.io", config({"credHelpers": {"quay.io": "test"}})) is None


async def test_a_helper_that_fails(config, helper):
    helper("echo keyring is locked >&2; exit 1")
    with pytest.raises(InfraError) as caught:
        await find("quay.io", config({"credsStore": "test"}))
    assert caught.value.code == "credential_helper" and "locked" in caught.value.message


@pytest.mark.parametrize("doc", ["{", "[]", '{"auths": {"x": {"auth": "***"}}}', '{"auths": 5}'])
async def test_a_broken_file_is_named(config, doc):
    path = config(doc)
    with pytest.raises(UserError) as caught:
        await find("x", path)
    assert str(path) in caught.value.message
