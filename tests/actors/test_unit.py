"""A unit's ranks, without Ray: whatever comes and goes, each job ends as it would have alone."""

import socket
from pathlib import Path
from unittest.mock import MagicMock, Mock

import psutil
import pytest
import toy
import unit_scenes
from ranks import Ranks
from unit_scenes import PLANS, off

from tlora.actors.meeting import collective_s, interface_to
from tlora.actors.messages import WorkerOptions
from tlora.job import State
from tlora.plan import Plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write_base(tmp_path)
    return tmp_path


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_jobs_that_come_and_go_end_as_alone(plan: Plan, ranks: Ranks, folder: Path) -> None:
    """Split over two lanes while there is only one, moved to one when others come, saved, dropped, back again."""
    seen, _ = ranks.run(2, unit_scenes.play, plan, folder, unit_scenes.come_and_go)
    for name in ("first", "second", "third"):
        assert seen[name].state is State.FINISHED
        assert off(folder, name, steps=unit_scenes.COME_AND_GO[name]) < 1e-8


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_candidate_halts_at_its_rung_on_all_its_ranks(plan: Plan, ranks: Ranks, folder: Path) -> None:
    seen, _ = ranks.run(2, unit_scenes.play, plan, folder, unit_scenes.halts_at_its_rung)
    assert seen["candidate"].state is State.FINISHED
    assert off(folder, "candidate", steps=8, eval_every=2, save_every=100, batch_size=2) < 1e-8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_one_rank_cannot_read_fails_alone(rank: int, ranks: Ranks, folder: Path) -> None:
    seen, _ = ranks.run(2, unit_scenes.without_data, PLANS["parts"], folder, rank)
    assert (seen["bad"].state, seen["bad"].reason) == (State.FAILED, "no such file here")
    assert seen["good"].state is State.FINISHED


def test_a_base_that_cannot_be_loaded_fails_its_job_and_is_tried_again(ranks: Ranks, folder: Path) -> None:
    seen, _ = ranks.run(2, unit_scenes.play, PLANS["shards"], folder, unit_scenes.base_is_broken)
    assert seen["early"].state is State.FAILED
    assert "base.model" in seen["early"].reason
    assert seen["late"].state is State.FINISHED


def test_a_folder_held_elsewhere_is_waited_for_and_a_save_is_made_by_the_clock(ranks: Ranks, folder: Path) -> None:
    scene = unit_scenes.held_elsewhere_and_saved_by_the_clock
    seen, _ = ranks.run(2, unit_scenes.play, PLANS["parts"], folder, scene, 0.01)
    assert seen["held"].state is State.FINISHED


def test_a_collective_that_hangs_is_found_out_in_minutes() -> None:
    """25: though files may be tried again in it for five of them, and the base's loading take half an hour."""
    base = {"model": "m"}
    assert collective_s(WorkerOptions(group="g", base=base)) == 360.0
    assert collective_s(WorkerOptions(group="g", base=base, stuck_after_s=30.0)) == 30.0


def test_ranks_speak_by_the_network_in_which_the_first_one_is() -> None:
    """Not by that which their hosts' own names mean."""
    names = {
        each.address: name for name, addresses in psutil.net_if_addrs().items() for each in addresses
        if each.family == socket.AF_INET
    }  # fmt: skip
    assert len(names) > 0
    assert all(interface_to(address, 1) == name for address, name in names.items())


def test_a_scope_is_no_part_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    way = MagicMock()
    way.return_value.__enter__.return_value.getsockname.return_value = ("fe80::1%eth9", 1, 0, 3)
    monkeypatch.setattr(socket, "socket", way)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth9": [Mock(address="fe80::1%eth9")]})
    assert interface_to("::1", 1) == "eth9"


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), OSError(101, "unreachable")])
def test_where_there_is_no_way_no_interface_is_named(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried next says what is wrong."""
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    assert interface_to("nowhere", 1) == ""
