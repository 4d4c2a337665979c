import pytest
from tests import corpus


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """Nobody's own credentials take part."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder


@pytest.fixture
def layout(tmp_path):
    """An image of three small layers; the last alone is over a megabyte."""
    layers = [
        corpus.Layer("gzip").folder("etc").add("etc/one", data=b"1"),
        corpus.Layer("zstd").add("two", data=corpus.noise(50_000)),
        corpus.Layer("plain").add("three", data=corpus.noise(1_200_000)),
    ]
    path = tmp_path / "layout"
    config = {"Env": ["A=b"], "Cmd": ["/bin/x"], "User": "1000:7", "WorkingDir": "/w"}
    corpus.write(path, layers, config)
    return path
