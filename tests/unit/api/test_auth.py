import re
import stat

import pytest

from agentenv.api.auth import load_or_create_key
from agentenv.errors import InfraError


def test_a_key_is_made_once_private_and_in_the_form_sdks_check(tmp_path, monkeypatch):
    monkeypatch.delenv("AENV_API_KEY", raising=False)
    path = tmp_path / "secrets" / "api-key"
    key = load_or_create_key(path)
    assert re.fullmatch("e2b_[0-9a-f]{40}", key) and load_or_create_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["api-key"]


def test_the_environment_wins_and_an_empty_file_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "api-key"
    path.write_text("\n")
    monkeypatch.setenv("AENV_API_KEY", "given")
    assert load_or_create_key(path) == "given"
    monkeypatch.delenv("AENV_API_KEY")
    with pytest.raises(InfraError):
        load_or_create_key(path)
