"""What two lists of changes over one image make of each other."""

from dataclasses import replace

from agentenv.sdk.diff import Change, Entry, compare

FILE = Entry("file", 0o644, 0, 0, 5, 1_000)
LONGER = replace(FILE, size=9, mtime_ns=2_000)
FOLDER = Entry("directory", 0o755, 0, 0, 0, 1_000)
GONE = Change(None, FILE)
NEW = Change(FILE, None)


def told(one, other):
    return [f"{each.change} {each.path}" for each in compare(one, other)]


def test_what_one_has_alone_is_added_or_deleted():
    assert told({}, {"/new": NEW}) == ["A /new"]
    assert told({"/new": NEW}, {}) == ["D /new"]
    assert told({}, {"/old": GONE}) == ["D /old"]
    assert told({"/old": GONE}, {}) == ["A /old"]
    assert told({"/old": GONE}, {"/old": GONE}) == []


def test_what_the_image_has_is_modified():
    changed = {"/f": Change(LONGER, FILE)}
    (found,) = compare({}, changed)
    assert (found.change, found.before, found.after) == ("M", 5, 9)
    (back,) = compare(changed, {})
    assert (back.change, back.before, back.after) == ("M", 9, 5)
    assert told(changed, changed) == told({}, {"/f": Change(FILE, FILE)}) == []


def test_a_folders_time_is_no_change_and_its_mode_is():
    later, closed = replace(FOLDER, mtime_ns=9), replace(FOLDER, mode=0o700)
    assert told({}, {"/d": Change(later, FOLDER)}) == []
    assert told({}, {"/d": Change(closed, FOLDER)}) == ["M /d"]


def test_what_went_with_its_folder_is_deleted():
    one = {"/d": Change(FOLDER, FOLDER), "/d/a": Change(LONGER, FILE), "/d/b": NEW}
    other = {"/d": Change(None, FOLDER)}
    assert told(one, other) == ["D /d", "D /d/a", "D /d/b"]
    assert told(other, one) == ["A /d", "A /d/a", "A /d/b"]
    replaced = {"/d": Change(FILE, FOLDER)}
    assert told(one, replaced) == ["M /d", "D /d/a", "D /d/b"]


def test_contents_decide_where_they_were_read():
    one, touched = replace(FILE, sha256="1"), replace(FILE, sha256="1", mtime_ns=7)
    assert told({"/f": Change(one, None)}, {"/f": Change(touched, None)}) == []
    assert told({"/f": NEW}, {"/f": Change(replace(FILE, mtime_ns=7), None)}) == ["M /f"]
    other = replace(one, sha256="2")
    assert told({"/f": Change(one, None)}, {"/f": Change(other, None)}) == ["M /f"]


def test_who_a_sandbox_is_told_to_be_is_no_change():
    assert told({}, {"/etc/hostname": Change(LONGER, FILE), "/etc/machine-id": NEW}) == []
