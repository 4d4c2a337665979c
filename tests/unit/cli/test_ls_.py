from agentenv.api.paging import parse_metadata
from agentenv.cli.ls_ import filter_of


def test_a_filter_comes_out_as_it_was_meant():
    wanted = {"a b": "c&d=e", "ü": "100%"}
    assert parse_metadata(filter_of(wanted)) == wanted
    assert filter_of({}) == ""
