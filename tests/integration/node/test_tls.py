"""A server with a certificate: the API, a sandbox's agent and a tunnel, all over TLS."""

import json
import shutil
import ssl
import subprocess

import httpx
import pytest
from tests.leaks import HostObjects
from tests.server import TestServer, new_home


@pytest.fixture(scope="module")
def secured(scratch):
    folder = scratch / "tls"
    folder.mkdir()
    cert, key = folder / "crt", folder / "key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    environ = {"AENV_TLS_CERT": str(cert), "AENV_TLS_KEY": str(key), "AENV_CA_FILE": str(cert)}
    server = TestServer(new_home(scratch), environ=environ, authority=cert)
    before = HostObjects.now()
    server.home.mkdir(mode=0o711)
    server.start()
    try:
        root = folder / "root"
        (root / "bin").mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin/busybox")
        for tool in ("sh", "cat", "nc"):
            (root / "bin" / tool).symlink_to("busybox")
        server.cli("image", "pull", f"dir:{root}", "--name", "base", check=True)
        yield server
    finally:
        server.close()
        assert not HostObjects.now().more_than(before, server.home)


def test_everything_goes_over_tls(secured):
    made = secured.create("base", timeout=300)
    sandbox = made["sandboxID"]
    done = secured.cli("exec", sandbox, "--", "sh", "-c", "cat; exit 3", stdin=b"in\n")
    assert (done.returncode, done.stdout) == (3, b"in\n")
    assert json.loads(secured.cli("ls", check=True).stdout)[0]["sandboxID"] == sandbox
    secured.cli("cp", "/etc/hostname", f"{sandbox}:/h", check=True)
    context = ssl.create_default_context(cafile=secured.authority)
    headers = {"E2b-Sandbox-Id": sandbox, "X-Access-Token": made["envdAccessToken"]}
    with httpx.Client(http2=True, verify=context, trust_env=False, headers=headers) as client:
        answer = client.get(f"{secured.url}/files?path=/h")
        assert answer.http_version == "HTTP/2" and answer.status_code == 200
    secured.cli("kill", sandbox, check=True)


def test_without_trust_nothing_is_said(secured):
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secured.url}/health", trust_env=False)
    plain = httpx.Client(trust_env=False)
    with pytest.raises(httpx.HTTPError):
        plain.get(f"http://127.0.0.1:{secured.port}/health")
