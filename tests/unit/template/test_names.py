import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import UserError
from agentenv.template.names import TemplateName, check, means_image, parse


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("base", TemplateName("base", "default")),
        ("Base:V1.2", TemplateName("base", "v1.2")),
        ("team/snap_x-1", TemplateName("team/snap_x-1", "default")),
        ("localhost:5000/x", None),
        ("a/b/c", None),
        ("debootstrap:bookworm+curl", None),
        (":x", None),
        ("x:", None),
        ("", None),
        ("x" * 200, None),
    ],
)
def test_forms(text, name):
    assert parse(text) == name


@given(st.text(max_size=140))
def test_parse_never_fails_and_check_agrees_with_it(text):
    found = parse(text)
    if found is None:
        with pytest.raises(UserError):
            check(text)
    else:
        assert parse(f"{found.name}:{found.tag}") == found


def test_a_build_id_is_no_tag():
    with pytest.raises(UserError):
        check("x:123e4567-e89b-12d3-a456-426614174000")


def test_only_what_looks_like_a_reference_may_be_pulled():
    assert not means_image("base")
    for reference in ("debian:bookworm", "library/debian", "debootstrap:bookworm", "a@sha256:0"):
        assert means_image(reference)
