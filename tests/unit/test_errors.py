import inspect

from agentenv import errors


def test_codes_and_exit_codes_tell_the_kinds_apart():
    classes = inspect.getmembers(errors, inspect.isclass)
    kinds = [c for _, c in classes if issubclass(c, errors.AgentEnvError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    acting = (errors.UserError, errors.ImageError, errors.GuestError, errors.InfraError)
    assert len({kind.exit_code for kind in acting}) == 4
    assert errors.UserError.http_status < 500 <= errors.InfraError.http_status


def test_the_message_says_what_why_and_what_to_do():
    error = errors.Conflict("a", why="b", fix="c", code="x", state="running")
    assert error.message == "a: b (c)" and error.code == "x" and error.http_status == 409
    assert error.details == {"state": "running"} and errors.Conflict.code == "conflict"
