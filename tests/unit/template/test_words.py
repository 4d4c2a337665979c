import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import UserError
from agentenv.template.words import expand, expand_text

ENV = {"A": "one", "EMPTY": "", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("$A", "one"),
        ("${A}s $A/x", "ones one/x"),
        ("$NONE-", "-"),
        ("${NONE:-other}${EMPTY:-also}${A:+set}", "otheralsoset"),
        ("$PATH:/x", "/bin:/x"),
        (r"\$A", "$A"),
        (r"\\$A", r"\one"),
        (r"C:\dir\$A", r"C:\dir$A"),
        ('say "$A"', 'say "one"'),
        (r"a\"b", 'a"b'),
        ("it's $A", "it's one"),
        ("$(date) `x` $", "$(date) `x` $"),
        ("end\\", "end\\"),
        ("", ""),
        ("two\nlines $A", "two\nlines one"),
    ],
)
def test_e2b_words_are_as_within_double_quotes(text, wanted):
    assert expand(text, ENV) == wanted


@pytest.mark.parametrize(
    ("word", "escape", "wanted"),
    [
        ('"a $A"', "\\", "a one"),
        ("'a $A'", "\\", "a $A"),
        (r"a\ b\$A", "\\", "a b$A"),
        ("C:\\dir`$A", "`", "C:\\dir$A"),
        ('"x"/y', "\\", "x/y"),
        ("${A%e}", "\\", "on"),
    ],
)
def test_words_of_dockerfiles_lose_their_quotes(word, escape, wanted):
    assert expand(word, ENV, escape) == wanted


def test_quotes_are_text_in_a_heredoc():
    assert expand_text("a \"$A\" 'x $A' \\$A\n", ENV) == "a \"one\" 'x one' $A\n"


@pytest.mark.parametrize("text", ["${A", "${}", "${A!x}", "${NONE:?must be set}"])
def test_what_is_no_substitution_is_the_users_fault(text):
    with pytest.raises(UserError) as caught:
        expand(text, ENV)
    assert caught.value.code == "bad_substitution"


@given(st.text(st.characters(exclude_characters="$\0", codec="utf-8")))
def test_text_without_variables_and_escapes_is_itself(text):
    plain = text.replace("\\", "/")
    assert expand(plain, ENV) == plain
