"""A job's record: which transitions are legal, and that every end keeps its reason."""

import itertools

import pytest

from tlora.errors import StateError
from tlora.job import JobRecord, State

ENDS = {State.FINISHED, State.CANCELLED, State.FAILED}
LEGAL = {
    (State.QUEUED, State.ATTACHING), (State.ATTACHING, State.RUNNING), (State.ATTACHING, State.QUEUED),
    (State.RUNNING, State.PAUSED), (State.RUNNING, State.QUEUED), (State.RUNNING, State.FINISHED),
    (State.PAUSED, State.QUEUED), (State.PAUSED, State.ATTACHING),
    (State.QUEUED, State.PAUSED), (State.ATTACHING, State.PAUSED), (State.ATTACHING, State.FINISHED),
    (State.CANCELLED, State.QUEUED), (State.FAILED, State.QUEUED),
    *itertools.product(set(State) - ENDS, {State.CANCELLED, State.FAILED}),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_transitions(old: State, new: State) -> None:
    record = JobRecord("a", old, "before")
    if new is old:
        record.to(new, "again")
        assert record.reason == "before"
    elif (old, new) in LEGAL:
        record.to(new, "because")
        assert (record.state, record.reason) == (new, "because")
    else:
        with pytest.raises(StateError, match=f"job a is {old}: it cannot become {new}; want "):
            record.to(new, "because")
        assert (record.state, record.reason) == (old, "before")


def test_ends() -> None:
    assert {state for state in State if state.is_terminal} == ENDS
