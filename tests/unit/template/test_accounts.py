import pytest

from agentenv.errors import UserError
from agentenv.template.accounts import Accounts

PASSWD = "root:x:0:0:root:/root:/bin/bash\nbroken\napp:x:1000:50:App:/app:/bin/sh"
GROUP = "root:x:0:\nstaff:x:50:app\nuser:x:77:\n"
SOME = Accounts(PASSWD, GROUP, "root:*:1:0:99999:7:::\n")


@pytest.mark.parametrize(
    ("spec", "owner"),
    [
        ("app", (1000, 50)), ("app:root", (1000, 0)), ("root", (0, 0)), ("app:7", (1000, 7)),
        ("55", (55, 55)), ("55:staff", (55, 50)), ("0:0", (0, 0)), ("1000:", (1000, 1000)),
    ],
)  # fmt: skip
def test_owners_by_dockers_rules(spec, owner):
    assert SOME.owner(spec) == owner


@pytest.mark.parametrize("spec", ["nobody", "app:none", "broken"])
def test_who_is_not_there_is_named_in_the_agents_words(spec):
    with pytest.raises(UserError) as caught:
        SOME.owner(spec)
    assert caught.value.message.startswith("invalid ") and caught.value.code == "unauthenticated"


def test_an_image_without_files_has_root():
    assert Accounts().owner("root:root") == (0, 0)


def test_a_user_more_takes_a_free_number_and_keeps_the_rest():
    more = SOME.with_user("user", "/bin/bash")
    assert more.passwd == PASSWD + "\nuser:x:1001:77::/home/user:/bin/bash\n"
    assert more.group == GROUP and more.shadow.splitlines()[-1].startswith("user:!:")
    assert more.has("user") and not SOME.has("user") and more.owner("user") == (1001, 77)


def test_a_group_is_made_where_there_is_none_of_the_name():
    more = Accounts("", "other:x:1000:\n").with_user("new", "/bin/sh")
    assert more.passwd == "new:x:1000:1001::/home/new:/bin/sh\n"
    assert more.group == "other:x:1000:\nnew:x:1001:\n" and more.shadow == ""
    assert Accounts().with_user("new", "/bin/sh").group == "new:x:1000:\n"
