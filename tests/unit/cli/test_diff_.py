"""How differences are shown."""

from agentenv.cli.diff_ import printable


def test_a_name_stays_on_its_line():
    assert printable("/srv/Ä b") == "/srv/Ä b"
    assert printable("/a\nM /b\x1b[2J") == "/a\\nM /b\\x1b[2J"
