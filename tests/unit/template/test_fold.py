import pytest

from agentenv.errors import UserError
from agentenv.model import Guest, ImageConfig
from agentenv.template import fold
from agentenv.template.fold import State, absolute, captured
from agentenv.template.recipe import Kind, Step

STATE = State({"PATH": "/bin", "A": "one"}, "user", "/home/user")
FILES = "f" * 64


def after(*steps: Step, state: State = STATE) -> tuple[State, list]:
    actions = []
    for step in steps:
        state, action = fold.fold(state, step)
        actions.append(action)
    return state, actions


def test_an_image_begins_as_docker_or_e2b_would():
    config = ImageConfig(("A=1", "broken"), "/app", "app", volumes=("/v",))
    assert fold.state_of_image(config, provision=False) == State(
        {"A": "1"}, "app", "/app", volumes=("/v",)
    )
    assert fold.state_of_image(config, provision=True).guest() == Guest(
        {"A": "1"}, "user", "/home/user", ("/v",)
    )
    bare = fold.state_of_image(ImageConfig(), provision=False)
    assert (bare.user, bare.workdir) == ("root", "/")


def test_a_template_goes_on_as_it_ended():
    guest = Guest({"A": "1"}, "app", "/app", ("/v",))
    assert fold.state_of_guest(guest).guest() == guest
    assert fold.state_of_guest(Guest()).guest() == Guest({}, "user", "/home/user")


def test_values_see_what_was_set_before():
    steps = [("A", "two", "B", "$A"), ("PATH", "$PATH:/x", "C", "$A")]
    docker, _ = after(*(Step(Kind.ENV, args, escape="\\") for args in steps))
    assert docker.env == {"PATH": "/bin:/x", "A": "two", "B": "one", "C": "two"}
    e2b, _ = after(*(Step(Kind.ENV, args) for args in steps))
    assert e2b.env == {"PATH": "/bin:/x", "A": "two", "B": "two", "C": "two"}


def test_arguments_are_seen_while_building_and_give_way_to_the_environment():
    state, actions = after(
        Step(Kind.ARG, ("V", "1", "A", "hidden"), escape="\\"),
        Step(Kind.EXEC, ("/bin/sh", "-c", "echo $V")),
        Step(Kind.ENV, ("W", "$V$A"), escape="\\"),
    )
    assert actions[1].env == {"V": "1", "A": "one", "PATH": "/bin"}
    assert state.guest().env == {"PATH": "/bin", "A": "one", "W": "1one"}


def test_commands_run_as_e2b_runs_them():
    _, (run, other) = after(Step(Kind.RUN, ("echo $A",)), Step(Kind.RUN, ("id", "root")))
    assert run.argv == ("/bin/bash", "-l", "-c", "echo $A")
    assert (run.cwd, run.user, run.command) == ("/home/user", "user", "echo $A")
    assert other.user == "root"


def test_folders_are_relative_to_the_one_before():
    state, actions = after(
        Step(Kind.WORKDIR, ("app",)),
        Step(Kind.WORKDIR, ("../$A/",)),
        Step(Kind.WORKDIR, ("/a//b",)),
    )
    assert [action.path for action in actions] == ["/home/user/app", "/home/user/one", "/a/b"]
    assert state.workdir == "/a/b" and actions[0].owner == "user"


def test_e2b_makes_users_and_docker_does_not():
    state, (made,) = after(Step(Kind.USER, ("app", "true")))
    assert state.user == "app" and made == fold.AddUser("app")
    for step in (Step(Kind.USER, ("1000",)), Step(Kind.USER, ("app:staff",), escape="\\")):
        state, (nothing,) = after(step)
        assert state.user == step.args[0] and nothing is None


def test_copies_know_where_whose_and_how():
    _, (plain, given, docker) = after(
        Step(Kind.COPY, ("a", "b/"), files=FILES),
        Step(Kind.COPY, ("a", "/b", "root:root", "0755"), files=FILES),
        Step(Kind.COPY, ("/src/$A", '"/b c"', "", ""), stage="s", keep_owner=True, escape="\\"),
    )
    assert plain == fold.Copy("a", "/home/user/b/", "user", None, FILES, None)
    assert given == fold.Copy("a", "/b", "root:root", 0o755, FILES, None)
    assert docker == fold.Copy("/src/one", "/b c", None, None, None, "s")


def test_a_heredoc_is_written_with_its_variables_if_it_wants():
    args = ("EOF", "a $A\n", "/x/", "", "600", "expand")
    _, (wanted, raw) = after(
        Step(Kind.FILE, args, escape="\\"), Step(Kind.FILE, (*args[:5], ""), escape="\\")
    )
    assert wanted == fold.Write("EOF", "a one\n", "/x/", "root", 0o600)
    assert raw.content == "a $A\n"


def test_volumes_are_collected_once():
    state, _ = after(
        Step(Kind.VOLUME, ("/v", "/$A"), escape="\\"), Step(Kind.VOLUME, ("/v",), escape="\\")
    )
    assert state.guest().volumes == ("/v", "/one")


@pytest.mark.parametrize(
    "step",
    [
        Step(Kind.USER, ("$NONE",)),
        Step(Kind.ENV, ("$NONE", "x")),
        Step(Kind.ENV, ("A=B", "x")),
        Step(Kind.COPY, ("a", "b", "", "u+x"), files=FILES),
        Step(Kind.COPY, ("a", "b", "", "17777"), files=FILES),
        Step(Kind.WORKDIR, ("${",)),
    ],
)
def test_what_cannot_be_is_refused(step):
    with pytest.raises(UserError):
        fold.fold(STATE, step)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("x", "/w/x"), ("x/", "/w/x/"), (".", "/w/"), ("./", "/w/"), ("", "/w/"), ("/", "/"),
        ("//a", "/a"), ("../..", "/"), ("x/.", "/w/x/"), ("/a/./b", "/a/b"),
    ],
)  # fmt: skip
def test_destinations_keep_meaning_folders(path, wanted):
    assert absolute(path, "/w", keep_slash=True) == wanted
    assert absolute(path, "/w") == (wanted.rstrip("/") or "/")


def test_snapshots_are_taken_after_commands_and_before_them():
    run, copy = (fold.Run((), {}, "", "", ""), fold.MakeFolder("/x", "root"))
    assert captured([]) == []
    assert captured([None, None]) == [False, False]
    assert captured([copy, copy, run, run]) == [False, True, True, True]
    assert captured([copy, None, run, copy]) == [False, True, True, True]
    assert captured([run, copy, None, copy, None]) == [True, False, False, False, True]
