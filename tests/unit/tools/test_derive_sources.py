import pytest
from tools.setup import derive_sources as ds

DEB822 = """\
Types: deb
# a comment in the middle
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/own.gpg

Types: deb-src
URIs: http://mirror.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm-backports
Components: main
"""

EMBEDDED_KEY = """\
Types: deb
URIs: https://mirror.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 bXkga2V5
 -----END PGP PUBLIC KEY BLOCK-----
"""


def etc(tmp_path, **files):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    for name, text in files.items():
        stem, _, ending = name.rpartition("_")
        (parts / f"{stem}.{ending}").write_text(text)
    return tmp_path


def derived(folder, *wanted, base="bookworm"):
    return ds.derive(ds.read_machine(folder), base, wanted)


def test_the_entry_of_the_machine_with_the_suite_exchanged(tmp_path):
    text = derived(etc(tmp_path, debian_sources=DEB822), "bookworm-backports")
    assert text.splitlines() == [
        "Types: deb",
        "URIs: http://mirror.example/debian",
        "Suites: bookworm-backports",
        "Components: main",
        "Signed-By: /usr/share/keyrings/own.gpg",
    ]


def test_one_line_entries_keep_their_options():
    line = (
        "deb [arch=amd64,i386 signed-by=/k.gpg trusted=yes] http://m.example/debian bookworm main"
    )
    (entry,) = ds.parse_one_line(
        f"# deb http://no.example x main\n{line} contrib # why\n\ndeb-src u s c\n"
    )
    assert entry == ds.Entry(
        ("http://m.example/debian",),
        ("bookworm",),
        ("main", "contrib"),
        {"Architectures": "amd64 i386", "Signed-By": "/k.gpg", "Trusted": "yes"},
    )


def test_both_formats_give_the_same_entry(tmp_path):
    one_line = (
        "deb [signed-by=/usr/share/keyrings/own.gpg] http://mirror.example/debian bookworm main\n"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    old = derived(etc(tmp_path / "a", debian_list=one_line), "trixie")
    assert old == derived(etc(tmp_path / "b", debian_sources=DEB822), "trixie")


def test_sources_list_itself_is_read(tmp_path):
    (tmp_path / "sources.list").write_text("deb http://m.example/debian bookworm main\n")
    assert "Suites: trixie\n" in derived(tmp_path, "trixie")


def test_a_key_inside_the_entry_survives(tmp_path):
    text = derived(etc(tmp_path, debian_sources=EMBEDDED_KEY), "trixie")
    assert text.endswith(EMBEDDED_KEY.partition("Components: main\n")[2])
    (again,) = ds.parse_deb822(text)
    assert again.options == ds.parse_deb822(EMBEDDED_KEY)[0].options


def test_disabled_and_source_only_entries_do_not_count(tmp_path):
    entries = ds.read_machine(etc(tmp_path, debian_sources=DEB822))
    assert len(entries) == 1
    assert not ds.has_suite(entries, "bookworm-backports")


def test_a_suite_that_the_user_has_is_not_offered_twice(tmp_path, capsys):
    own = DEB822.replace("Enabled: no", "Enabled: yes")
    folder = etc(tmp_path, debian_sources=own)
    args = ["--etc", str(folder), "--base", "bookworm", "--missing-only"]
    assert ds.main([*args, "bookworm-backports"]) == 0
    assert capsys.readouterr().out == ""
    assert ds.main([*args, "bookworm-backports", "trixie"]) == 0
    assert "Suites: trixie\n" in capsys.readouterr().out


def test_what_we_wrote_ourselves_is_not_the_users(tmp_path):
    folder = etc(
        tmp_path,
        debian_sources=DEB822,
        agentenv_sources=DEB822.replace("bookworm bookworm-updates", "bookworm-backports"),
    )
    assert not ds.has_suite(ds.read_machine(folder), "bookworm-backports")


def test_files_of_other_endings_are_ignored_as_apt_does(tmp_path):
    (etc(tmp_path, debian_sources=DEB822) / "sources.list.d" / "x.sources.save").write_text(
        DEB822.replace("bookworm", "sid")
    )
    assert not ds.has_suite(ds.read_machine(tmp_path), "sid")


def test_installation_discs_are_no_archive(tmp_path):
    (tmp_path / "sources.list").write_text(
        "deb cdrom:[Debian]/ bookworm main\ndeb http://m.example/debian bookworm main\n"
    )
    assert "URIs: http://m.example/debian\n" in derived(tmp_path, "trixie")


def test_ubuntu_lists_universe_apart(tmp_path):
    (tmp_path / "sources.list").write_text(
        "deb http://m.example/ubuntu noble main restricted\n"
        "deb http://m.example/ubuntu noble universe\n"
    )
    assert "Components: main universe\n" in derived(tmp_path, "resolute", base="noble")


def test_a_machine_without_its_own_suite_is_told_so(tmp_path, capsys):
    folder = etc(tmp_path, debian_sources=DEB822)
    with pytest.raises(LookupError, match="noble"):
        derived(folder, "resolute", base="noble")
    assert ds.main(["--etc", str(folder), "--base", "noble", "resolute"]) == 1
    assert "noble" in capsys.readouterr().err
