from pathlib import Path

import pytest

from agentenv.config import Config, load, render
from agentenv.errors import UserError


def test_later_sources_win(tmp_path):
    (tmp_path / "config.toml").write_text(
        'memory_mib = 1024\nlisten = "0.0.0.0:1"\ndns = ["9.9.9.9"]'
    )
    env = {"AENV_LISTEN": "0.0.0.0:2", "AENV_ALLOW_PRIVATE": "10.0.0.0/8, 192.168.1.0/24"}
    config = load({"home": tmp_path, "listen": "0.0.0.0:3", "engine": None}, env)
    assert (config.memory_mib, config.listen, config.engine) == (1024, "0.0.0.0:3", "auto")
    assert config.allow_private == ("10.0.0.0/8", "192.168.1.0/24") and config.dns == ("9.9.9.9",)
    assert load({"home": tmp_path}, env).listen == "0.0.0.0:2"
    assert load({}, {"AENV_HOME": str(tmp_path)}).home == tmp_path


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "h:99999"}, "listen"),
        ({"engine": "docker"}, "engine"),
        ({"memory_mib": "lots"}, "memory_mib"),
        ({"memory_mib": -1}, "memory_mib"),
        ({"uplink_network": "10.0.0.1/8"}, "uplink_network"),
        ({"tls_cert": "/c"}, "tls_key"),
        ({"tls_key": "/k"}, "tls_cert"),
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path, flags, named):
    with pytest.raises(UserError) as caught:
        load({"home": tmp_path, **flags}, {})
    assert caught.value.code == "invalid_config" and named in caught.value.message


def test_a_bad_file_is_refused(tmp_path):
    for text in ("memory = 1", "memory_mib = ", "\x00"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(UserError):
            load({"home": tmp_path}, {})


def test_the_rendered_form_is_a_configuration_file(tmp_path):
    given = load({"home": tmp_path, "dns": ["1.1.1.1"], "domain": 'a"b\\c'}, {})
    (tmp_path / "config.toml").write_text(render(given))
    assert load({"home": tmp_path}, {}) == given


def test_two_homes_share_no_host_object():
    one, two = Config(home=Path("/a")), Config(home=Path("/b"))
    assert one.tag != two.tag and one.runtime_dir != two.runtime_dir
    assert len(str(one.runtime_dir)) < 40


def test_tls_is_off_unless_a_pair_is_given(tmp_path):
    plain = load({"home": tmp_path}, {})
    assert (plain.tls, plain.scheme) == (None, "http")
    config = load({"home": tmp_path, "tls_cert": "/c"}, {"AENV_TLS_KEY": "/k"})
    assert (config.tls, config.scheme) == ((Path("/c"), Path("/k")), "https")
