import pytest
from pydantic import ValidationError

from agentenv.api.schemas import MAX_METADATA, MAX_VARIABLE, CreateBody


@pytest.mark.parametrize(
    "bad",
    [
        {"envVars": {"A": "\0"}},
        {"envVars": {"A\0": "x"}},
        {"envVars": {"": "x"}},
        {"envVars": {"A=B": "c"}},
        {"envVars": {"A": "\ud800"}},
        {"envVars": {"A": "x" * MAX_VARIABLE}},
        {"metadata": {"a": "\0"}},
        {"metadata": {"\udfff": "b"}},
        {"metadata": {"a": "x" * MAX_METADATA}},
        {"timeout": True},
        {"timeout": "5"},
        {"timeout": 0},
        {"timeout": 1 << 70},
        {"cpuCount": 0},
        {"memoryMB": True},
        {"templateID": ""},
    ],
)
def test_what_no_guest_could_take_is_refused_at_once(bad):
    with pytest.raises(ValidationError):
        CreateBody(**{"templateID": "base", **bad})


def test_ordinary_values_pass():
    body = CreateBody(templateID="base", envVars={"A": "ü=1"}, metadata={"k": ""}, timeout=60)
    assert body.envVars == {"A": "ü=1"} and body.request(secure=True, idempotency_key=None).secure
