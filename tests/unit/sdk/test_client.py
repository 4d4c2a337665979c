from pathlib import Path

import pytest

from agentenv.errors import Conflict, GuestError, InfraError, NotFound, UserError
from agentenv.sdk.client import Address, Client, error_from


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (404, {"code": 404, "message": "m", "error_code": "sandbox_not_found"}, NotFound, "sandbox_not_found"),
        (409, {"message": "m", "error_code": "conflict", "details": {"state": "killing"}}, Conflict, "conflict"),
        (500, {"message": "m", "error_code": "guest_boot_failed"}, GuestError, "guest_boot_failed"),
        (502, {"message": "m"}, InfraError, "http"),
        (400, {"message": "m", "error_code": "not_supported"}, UserError, "not_supported"),
    ],
)  # fmt: skip
def test_answers_become_the_typed_error_they_came_from(status, body, kind, code):
    error = error_from(status, body)
    assert type(error) is kind and error.code == code and error.http_status == status
    assert error.details == body.get("details", {})


async def test_no_server_is_said_so():
    async with Client(Address("http://127.0.0.1:9", "k")) as client:
        with pytest.raises(InfraError) as caught:
            await client.sandboxes()
    assert caught.value.code == "server_unreachable" and "aenv serve" in caught.value.fix


def test_the_key_comes_from_the_environment_or_the_home(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("AENV_API_KEY", raising=False)
    monkeypatch.delenv("AENV_URL", raising=False)
    with pytest.raises(UserError) as caught:
        Address.find(None, tmp_path, "h:1")
    assert caught.value.code == "no_api_key"
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "api-key").write_text("k\n")
    assert Address.find(None, tmp_path, "h:1") == Address("http://h:1", "k")
    monkeypatch.setenv("AENV_API_KEY", "other")
    assert Address.find("http://x", tmp_path, "h:1") == Address("http://x", "other")


def test_a_server_with_tls_is_found_by_https(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("AENV_URL", raising=False)
    monkeypatch.setenv("AENV_API_KEY", "k")
    assert Address.find(None, tmp_path, "h:1", "https") == Address("https://h:1", "k")


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_bad_ca_file_is_named(tmp_path: Path, monkeypatch, text):
    path = tmp_path / "ca.pem"
    if text:
        path.write_text(text)
    monkeypatch.setenv("AENV_CA_FILE", str(path))
    with pytest.raises(UserError) as caught:
        Client(Address("https://h:1", "k"))
    assert caught.value.code == "bad_ca_file" and str(path) in caught.value.message
