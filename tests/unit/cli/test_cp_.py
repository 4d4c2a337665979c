import pytest

from agentenv.cli.cp_ import split

ID = "0a1b2c3d4e5f6g7h8i9j"


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        (f"{ID}:/etc", (ID, "/etc")),
        (f"{ID}:a:b", (ID, "a:b")),
        (f"{ID}:", (ID, ".")),
        ("/etc", (None, "/etc")),
        ("C:/x", (None, "C:/x")),
        (f"./{ID}:/x", (None, f"./{ID}:/x")),
    ],
)
def test_an_id_before_a_colon_means_a_sandbox(word, wanted):
    assert split(word) == wanted
