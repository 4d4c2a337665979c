"""Languages by name, and code that changes their environment."""

import os
import subprocess

from hypothesis import given
from hypothesis import strategies as st

from agentenv.template.shipped.interpreter.languages import LANGUAGES, changes, find

NAMES = st.from_regex(r"AENV_T_[A-Z]{1,4}", fullmatch=True)
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
ENVIRONMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def test_by_name_alias_and_default():
    assert find(None) is find("python") is find("Python") is find("python3")
    assert find("js") is find("javascript")
    assert find("cobol") is None


@given(ENVIRONMENTS, ENVIRONMENTS, ENVIRONMENTS)
def test_changes_lead_from_one_environment_to_another(base, now, wanted):
    found = changes(base, now, wanted)
    after = {**base, **now}
    for name, value in found.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = value
    assert after == {**base, **wanted}


def test_nothing_to_change_is_nothing():
    assert changes({"A": "1"}, {"B": "2"}, {"B": "2"}) == {}


@given(ENVIRONMENTS, st.sets(NAMES, max_size=3))
def test_python_does_it_and_leaves_no_name(given_, gone):
    space = {}
    wanted = {**given_, **dict.fromkeys(gone)}
    before = dict(os.environ)
    try:
        exec(LANGUAGES["python"].assign(wanted), space)
        assert {name: os.environ.get(name) for name in wanted} == wanted
        assert set(space) == {"__builtins__"}
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_bash_does_it():
    code = LANGUAGES["bash"].assign({"A": "it's $HOME\n`x`", "B": None})
    script = f'export B=1; {code}; printf %s "$A"; test -z "${{B+x}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "it's $HOME\n`x`"


def test_deno_is_told_as_json():
    code = LANGUAGES["javascript"].assign({"A": 'quo"te', "B": None})
    assert code == 'Deno.env.set("A", "quo\\"te");Deno.env.delete("B");'
