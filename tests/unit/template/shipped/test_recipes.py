"""What comes with AgentENV, and the names of its images."""

import re
from dataclasses import replace

import pytest

from agentenv.errors import UserError
from agentenv.image.reference import parse
from agentenv.template.shipped import recipes
from agentenv.template.shipped.recipes import LOCK, SHIPPED, find, needed, reference


def names(found):
    return [each.name for each in found]


def test_what_a_template_goes_on_from_comes_first():
    assert names(needed([])) == ["base", "code-interpreter-v1"]
    assert names(needed(["code-interpreter-v1"])) == ["base", "code-interpreter-v1"]
    assert names(needed(["code-interpreter-v1", "base", "base"])) == ["base", "code-interpreter-v1"]
    assert names(needed(["base"])) == ["base"]


def test_an_unknown_one_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="code-interpreter-v1") as caught:
        needed(["base", "node"])
    assert caught.value.code == "unknown_template"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_reference_is_one_of_an_image(name):
    found = reference(find(name))
    assert found.name == name
    assert parse(str(found)) == found


def test_other_content_has_another_name(monkeypatch, tmp_path):
    base, interpreter = find("base"), find("code-interpreter-v1")
    before = reference(base), reference(interpreter)
    assert reference(replace(base, hooks=(*base.hooks, "true"))) != before[0]
    assert reference(replace(interpreter, start="other")) == before[1]  # not of the image

    lock = tmp_path / LOCK.name
    lock.write_text(LOCK.read_text() + "# more\n")
    monkeypatch.setattr(recipes, "LOCK", lock)
    assert reference(interpreter) != before[1]
    assert reference(base) == before[0]


def test_what_is_on_another_changes_with_it(monkeypatch):
    base, interpreter = find("base"), find("code-interpreter-v1")
    before = reference(interpreter)
    changed = replace(base, hooks=("true",))
    monkeypatch.setattr(recipes, "SHIPPED", {**SHIPPED, "base": changed})
    assert reference(interpreter) != before


def test_every_package_of_the_lock_has_a_hash():
    entries = LOCK.read_text().split("\n    --hash=sha256:")
    pinned = [line for line in LOCK.read_text().splitlines() if "==" in line]
    assert len(entries) > len(pinned) > 20
    assert all(" ; " not in line and line.endswith("\\") for line in pinned)


def test_the_server_imports_nothing_of_ours():
    assert {path.name for path in recipes.server_files()} >= {"__main__.py", "app.py"}
    for path in recipes.server_files():
        assert not re.findall(r"^\s*(?:from|import) agentenv", path.read_text(), re.MULTILINE), path
