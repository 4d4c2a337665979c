import subprocess
from pathlib import Path

import pytest
from tools import check_tree as ct
from tools.check_tree import Tree

LOGIC = "def f(x):\n    return x + 1\n"


def tree(tmp_path, files):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Tree(tmp_path, tuple(files))


@pytest.mark.parametrize(
    ("source", "logic"),
    [
        (LOGIC, True),
        ("class A:\n    async def f(self):\n        await g()\n", True),
        ("X = 1\nclass A:\n    y: int\n", False),
        ('class P(Protocol):\n    def f(self) -> int:\n        """Say."""\n        ...\n', False),
        ("def f():\n    pass\n", False),
    ],
)
def test_has_logic(source, logic):
    assert ct.has_logic(source) is logic


@pytest.mark.parametrize("kind", ["unit", "contract", "integration"])
def test_mirrored_tests_satisfy(tmp_path, kind):
    files = {"python/agentenv/a/b.py": LOGIC, f"tests/{kind}/a/test_b.py": ""}
    assert list(ct.mirror_faults(tree(tmp_path, files), {})) == []


def test_modules_at_the_top_and_folders_own_code_are_mirrored(tmp_path):
    files = {
        "python/agentenv/top.py": LOGIC,
        "tests/unit/test_top.py": "",
        "python/agentenv/a/__init__.py": LOGIC,
        "tests/unit/a/test_a.py": "",
    }
    assert list(ct.mirror_faults(tree(tmp_path, files), {})) == []


def test_a_module_without_tests_is_named_with_their_place(tmp_path):
    (fault,) = ct.mirror_faults(tree(tmp_path, {"python/agentenv/a/b.py": LOGIC}), {})
    assert "python/agentenv/a/b.py" in fault
    assert "tests/unit/a/test_b.py" in fault


def test_a_test_elsewhere_needs_a_declared_home(tmp_path):
    there = tree(tmp_path, {"python/agentenv/a/b.py": LOGIC, "tests/faults/test_b.py": ""})
    assert len(list(ct.mirror_faults(there, {}))) == 1
    homes = {"a/b.py": ("tests/faults/test_b.py", "needs a kill")}
    assert list(ct.mirror_faults(there, homes)) == []


@pytest.mark.parametrize(
    "files",
    [
        {"python/agentenv/a/b.py": LOGIC},  # its home does not exist
        {"tests/faults/test_b.py": ""},  # the module is gone
        {"python/agentenv/a/b.py": "X = 1\n", "tests/faults/test_b.py": ""},  # nothing to test
        {  # no exception any more
            "python/agentenv/a/b.py": LOGIC,
            "tests/faults/test_b.py": "",
            "tests/unit/a/test_b.py": "",
        },
    ],
)
def test_declared_homes_that_say_nothing_true_are_faults(tmp_path, files):
    homes = {"a/b.py": ("tests/faults/test_b.py", "needs a kill")}
    assert len(list(ct.mirror_faults(tree(tmp_path, files), homes))) == 1


@pytest.mark.parametrize(
    ("lines", "warned", "failed"), [(400, 0, 0), (401, 1, 0), (450, 1, 0), (451, 0, 1)]
)
def test_sizes(tmp_path, lines, warned, failed):
    there = tree(tmp_path, {"a.py": "x\n" * lines, "notes.md": "x\n" * 900})
    assert len(list(ct.size_warnings(there))) == warned
    assert len(list(ct.size_faults(there))) == failed


@pytest.mark.parametrize(
    ("name", "bad"),
    [("a/utils.py", 1), ("rust/Helpers.rs", 1), ("a/queue.py", 0), ("docs/common.md", 0)],
)
def test_names(tmp_path, name, bad):
    assert len(list(ct.name_faults(tree(tmp_path, {name: ""})))) == bad


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ('"""takes images from the left, gives layers."""\n', 0),
        ('"""Takes nothing."""\n', 0),
        ('"""Layers."""\n', 1),
        ("", 1),
    ],
)
def test_folders_say_what_they_take(tmp_path, text, bad):
    there = tree(tmp_path, {"python/agentenv/a/__init__.py": text})
    assert len(list(ct.docstring_faults(there))) == bad


def test_the_top_docstring_is_the_map_and_free(tmp_path):
    assert list(ct.docstring_faults(tree(tmp_path, {"python/agentenv/__init__.py": ""}))) == []


def test_machine_specific_text_is_found_in_any_tracked_file(tmp_path):
    there = tree(
        tmp_path,
        {
            "a.md": "fine\nget it from registry.example now\n",
            "b.toml": "notregistry.example\nx = '/checkout/here'\n",
            "c.py": "under/checkout/there and /checkouts/\n",
        },
    )
    needles = [("registry.example", "a registry host"), ("/checkout/", "a path")]
    assert list(ct.machine_faults(there, needles)) == [
        "a.md:2: names a registry host of this machine",
        "b.toml:2: names a path of this machine",
    ]


def test_files_that_are_no_text_are_passed_over(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\0registry.example")
    there = Tree(tmp_path, ("x.bin", "deleted.py"))
    assert list(ct.machine_faults(there, [("registry.example", "a host")])) == []
    assert list(ct.size_faults(there)) == []


def test_hosts_are_read_from_the_machines_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@Pip.example/simple")
    files = {
        "etc/apt/sources.list.d/d.sources": "URIs: http://deb.example/debian\n",
        "home/.npmrc": "registry=https://npm.example/\n",
        "home/.cargo/config.toml": 'index = "sparse+https://crates.example/index/"\n',
    }
    tree(tmp_path, files)
    assert ct.registry_hosts(tmp_path, tmp_path / "home") == {
        "deb.example", "npm.example", "crates.example", "pip.example",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("root", "home", "paths"),
    [
        ("/special/main", "/root", {"/special/"}),
        ("/home/ann/agentenv", "/home/ann", {"/home/ann/agentenv/", "/home/ann/"}),
        ("/tmp/clone", "/root", {"/tmp/clone/"}),
        ("/", "/root", set()),
    ],
)
def test_paths_of_this_machine(root, home, paths):
    assert ct.machine_paths(Path(root), Path(home)) == paths


def test_the_whole_check_on_a_repository(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ct, "HOMES", {})
    files = {"python/agentenv/a/__init__.py": '"""takes x, gives y."""\n'}
    tree(tmp_path, files)
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert ct.main([str(tmp_path)]) == 0
    tree(tmp_path, {"python/agentenv/a/b.py": LOGIC})
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    assert ct.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "tree: 2 files, 1 faults"
