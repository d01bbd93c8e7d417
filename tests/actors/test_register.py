"""A cluster's book of sweeps: wishes, answers, and what may not change."""

from pathlib import Path

import pytest

from tlora.actors.register import Foretold, Register, Row, row_of
from tlora.errors import SpecError, StateError
from tlora.job import State
from tlora.sweep import EarlyExit, Halving
from tlora.sweep_replay import begin
from tlora.sweep_spec import SweepSpec, parse_sweep


def sweep(**changes: object) -> SweepSpec:
    job = {"base": {"model": "m"}, "data": {"path": "d", "eval_path": "e"}}
    return parse_sweep({"name": "s", "job": job, "space": {"adapter.rank": [2, 4, 8]}, **changes})


@pytest.fixture
def book(tmp_path: Path) -> Register:
    (tmp_path / "_tlora").mkdir()  # with the mark
    return Register(tmp_path)


def test_no_sweep_is_taken_in_while_the_outputs_are_away(tmp_path: Path) -> None:
    """What is written beneath their mount is gone once it is back."""
    book = Register(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match=r"sweep s cannot be written down: there is no .*/_tlora\. See that"):
            book.submit(sweep(), 5.0)
    assert not list(tmp_path.iterdir())


def test_a_sweep_is_wished_for_answered_paused_and_goes_on(book: Register, tmp_path: Path) -> None:
    assert book.names() == []
    assert book.submit(sweep(), 5.0)
    assert not book.submit(sweep(), 6.0)
    assert book.wish("s").spec["output"] == str(tmp_path / "outputs" / "s")
    assert (book.is_open("s"), book.status("s")["state"]) == (True, "queued")
    book.tell("s", Row(1, State.RUNNING))
    book.want("s", State.PAUSED)
    assert book.is_open("s")  # until it is answered
    book.tell("s", Row(2, State.PAUSED))
    assert (book.is_open("s"), book.status("s")["state"]) == (False, "paused")
    assert book.submit(sweep(budget={"configurations": 3}), 7.0)
    assert (book.wish("s").number, book.wish("s").submitted_s) == (3, 5.0)
    with pytest.raises(SpecError, match="other settings: sampler"):
        book.submit(sweep(sampler={"seed": 3}), 8.0)
    book.tell("s", Row(3, State.FINISHED))
    with pytest.raises(StateError, match="sweep s is finished: it cannot become paused"):
        book.want("s", State.PAUSED)
    for _ in range(2):  # one that goes on is not begun anew
        book.want("s", State.RUNNING)
        assert book.is_open("s")
        assert book.wish("s").number == 4
    book.want("s", State.CANCELLED)
    with pytest.raises(StateError, match="sweep s is cancelled: it cannot become running"):
        book.want("s", State.RUNNING)
    with pytest.raises(StateError, match="sweep s is cancelled: it cannot be extended"):
        book.submit(sweep(budget={"configurations": 2}), 9.0)


def test_a_fork_of_its_leader_is_one_more_wish(book: Register) -> None:
    book.submit(sweep(), 5.0)
    with pytest.raises(StateError, match="no candidate leads yet"):
        book.fork("s", "first", ["optim.lr=1e-3"])
    state = begin({"s-000": 96, "s-001": 96}, EarlyExit(), 6)
    for one, loss in zip(state.candidates, (2.0, 1.0), strict=True):
        one.values, one.best_loss, one.best_samples = {"adapter.rank": 4}, loss, 6
    folder = Path(book.wish("s").spec["output"])
    folder.mkdir(parents=True)
    state.save(folder)
    book.tell("s", Row(1, State.FINISHED))
    for changes, says in (
        (["optim.lr=fast"], r"optim\.lr = 'fast'"),
        ([], "a fork wants changes"),
        (["base.model=other"], "losses of two bases do not compare"),
        (["name=x"], "is the sweep's to set"),
    ):
        with pytest.raises(SpecError, match=says):
            book.fork("s", "first", changes)
    assert not book.is_open("s")
    assert book.fork("s", "first", ["optim.lr=1e-3", "epochs=2"]) == "s-001"
    state.candidates[0].best_loss = 0.5
    state.save(folder)
    assert book.fork("s", "first", ["optim.lr=1e-3", "epochs=2"]) == "s-001"  # asked again: it is the same
    assert book.fork("s", "second", ["epochs=2"]) == "s-000"
    assert book.is_open("s")
    assert book.submit(sweep(budget={"configurations": 2}), 6.0)
    assert [(fork["of"], fork["changes"]) for fork in book.wish("s").forks] == [
        ("s-001", ["optim.lr=1e-3", "epochs=2"]),
        ("s-000", ["epochs=2"]),
    ]
    book.want("s", State.CANCELLED)
    with pytest.raises(StateError, match="its leader cannot be forked"):
        book.fork("s", "third", ["epochs=2"])


def test_what_is_expected_of_candidates_is_known_until_they_end(book: Register) -> None:
    state = begin({"s-000": 96, "s-001": 96}, EarlyExit(), 6)
    book.submit(sweep(), 0.0)
    state.candidates[0].samples = 6
    book.tell("s", row_of(state, Halving(), 1, State.RUNNING, "", 0.0))
    found = book.ahead()
    assert found["s-000"].sweep == "s"
    assert (found["s-000"].way, found["s-001"].way) == (90, 96)
    assert found["s-000"].steps(step=3, batch=6) == (pytest.approx((found["s-000"].expected - 12) / 6), 13.0)
    assert Foretold("s", 10.0, 10.0, 0).steps(step=100, batch=4) == (1.0, 1.0)
    book.tell("s", row_of(state, Halving(), 1, State.FINISHED, "", 0.0))
    assert book.ahead() == {}


def test_what_has_not_changed_is_not_read_again(
    book: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another process, whose writing is seen."""
    names = [f"s{n}" for n in range(5)]
    for name in names:
        book.submit(sweep(name=name), 0.0)
        book.tell(name, Row(1, State.FINISHED))
    other, reads, read = Register(tmp_path), list[str](), Path.read_text

    def counted(path: Path, **how: str) -> str:
        reads.append(path.name)
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", counted)
    for _ in range(3):
        assert not any(map(other.is_open, other.names()))
        assert other.ahead() == {}
    assert len(reads) == len(set(reads)) == 10
    for turn in range(2, 5):  # as large as before, and maybe at the same moment
        book.tell("s1", Row(turn, State.RUNNING, ahead={"c": (turn, 9.0, 0)}))
        assert (other.row("s1"), other.ahead()["c"].expected) == (book.row("s1"), turn)
    book.want("s2", State.RUNNING)
    assert [name for name in names if other.is_open(name)] == ["s1", "s2"]
