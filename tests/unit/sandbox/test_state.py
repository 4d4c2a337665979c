import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import Conflict
from agentenv.sandbox.state import MOVES, Request, State, move


@given(st.sampled_from(State), st.sampled_from(Request))
def test_a_move_is_in_the_table_or_an_error_that_names_both(state, request):
    if (state, request) in MOVES:
        assert move("s", state, request) is MOVES[state, request]
    else:
        with pytest.raises(Conflict) as caught:
            move("s", state, request)
        assert state in caught.value.message and request in caught.value.message
        assert caught.value.details["state"] == state.shown


def test_ended_is_the_end_and_reachable_from_everywhere():
    assert not [key for key in MOVES if key[0] is State.ENDED]
    for state in set(State) - {State.ENDED}:
        reached, todo = set(), [state]
        while todo:
            here = todo.pop()
            reached.add(here)
            todo += [to for (at, _), to in MOVES.items() if at is here and to not in reached]
        assert State.ENDED in reached
