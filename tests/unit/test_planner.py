"""Which plan is taken, and where jobs lie."""

from dataclasses import replace

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from tlora.base import Outline
from tlora.errors import ModelError
from tlora.plan import Plan
from tlora.planner import EstimatedCosts, Machine, RankMemory, choose, fewest, place, plans
from tlora.spec import AdapterSpec

GIB = 1 << 30


def outline_of(**changes: int) -> Outline:
    with torch.device("meta"):
        return Outline.of(AutoModelForCausalLM.from_config(LlamaConfig(**changes)), "llama")


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def costs_of(outline: Outline, machine: Machine, *, jobs: int = 8, rank: int = 16) -> EstimatedCosts:
    layout = outline.lay_out(AdapterSpec(rank=rank, targets="all-linear"))
    return EstimatedCosts(
        outline=outline, layouts=[layout] * jobs, machine=machine, rows=16384, dtype=torch.bfloat16, checkpointing=True
    )


@pytest.mark.parametrize(
    ("shape", "gpus", "memory", "fits"),
    [
        (LLAMA_8B, 1, 139, True),
        (LLAMA_8B, 8, 139, True),
        (LLAMA_8B, 16, 80, True),
        (LLAMA_8B, 1, 20, False),
        (LLAMA_70B, 1, 139, False),
        (LLAMA_70B, 2, 139, True),
        (LLAMA_70B, 8, 80, True),
        (LLAMA_70B, 16, 60, True),
    ],
)
def test_the_fastest_plan_that_fits(shape: dict, gpus: int, memory: int, fits: bool) -> None:  # type: ignore[type-arg]
    outline = outline_of(**shape)
    machine = Machine(gpus=gpus, memory_bytes=memory * GIB)
    choices = choose(costs_of(outline, machine), machine, divisor=outline.divisor)
    best = choices[0]
    assert best.fits == fits
    assert all(choice.plan.ranks == gpus for choice in choices)
    for choice in choices:
        assert choice.fits == (choice.memory.total <= 0.9 * machine.memory_bytes)
        assert not choice.fits or choice.rows_per_s <= best.rows_per_s
    if shape is LLAMA_8B and fits:
        assert best.plan == Plan(replicas=gpus)  # nothing is gathered or reduced
    elif fits:
        assert best.plan.is_spread


def test_measured_ticks_take_the_place_of_rates() -> None:
    outline, machine = outline_of(**LLAMA_8B), Machine(gpus=2)
    measured = replace(costs_of(outline, machine), tick_s=lambda rows: rows * 1e-4)
    assert measured.rows_per_s(Plan(replicas=2)) == pytest.approx(2e4)
    assert measured.rows_per_s(Plan(shards=2)) == pytest.approx(2e4)  # gathers run under compute
    assert 1e4 < measured.rows_per_s(Plan(tensor=2)) < 2e4


def test_the_fewest_gpus_with_room() -> None:
    outline = outline_of(**LLAMA_70B)

    def plan(gpus: int, memory: int) -> Plan | None:
        machine = Machine(gpus=gpus, memory_bytes=memory * GIB)
        return fewest(lambda machine: costs_of(outline, machine), machine, divisor=outline.divisor)

    two = plan(8, 139)
    assert two is not None
    assert (two.ranks, two.replicas) == (2, 1)
    small = plan(8, 80)
    assert small is not None
    assert small.ranks > 2
    assert plan(2, 80) is None
    assert plan(8, 300) == Plan()


def test_memory_of_a_plan() -> None:
    """An 8B base: 15 GiB whole; over four shards a quarter, and two layers of 0.41 GiB or the embedding and head."""
    machine = Machine(gpus=4)
    costs = costs_of(outline_of(**LLAMA_8B), machine)
    whole = costs.memory(Plan(replicas=4))
    sharded = costs.memory(Plan(shards=4))
    split = costs.memory(Plan(tensor=4))
    assert whole.base == pytest.approx(14.96 * GIB, rel=0.01)
    assert whole.gathered == split.gathered == 0
    assert sharded.base == pytest.approx(whole.base / 4, rel=0.01)
    assert sharded.gathered == pytest.approx(1.96 * GIB, rel=0.01)
    assert split.base == pytest.approx((13.0 / 4 + 1.96) * GIB, rel=0.01)
    assert whole.adapters * 4 == split.adapters  # a lane of four ranks has all eight jobs, one of one rank has two


def test_plans_use_every_gpu_and_split_products_on_one_node() -> None:
    found = plans(Machine(gpus=16, per_node=8), divisor=8)
    assert len(found) == len(set(found)) == 5 + 4 + 3 + 2
    assert all(plan.ranks == 16 and plan.tensor <= 8 for plan in found)
    assert {plan.tensor for plan in plans(Machine(gpus=12, per_node=8), divisor=8)} == {1, 2, 4}
    assert {plan.tensor for plan in plans(Machine(gpus=6), divisor=4)} == {1, 2}


def test_what_a_base_can_be_split_over() -> None:
    assert outline_of(**LLAMA_8B).divisor == 8
    assert toy.super_model().outline.divisor == 2
    with torch.device("meta"):
        packed = AutoModelForCausalLM.from_config(Phi3Config(num_hidden_layers=1))
    assert Outline.of(packed, "phi3").divisor == 1


def test_a_head_narrower_than_the_embedding_says_which_tokens_there_are() -> None:
    """A target beyond the head's outputs would be read from the next row's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=96, num_hidden_layers=1))
        model.lm_head = torch.nn.Linear(model.config.hidden_size, 88, bias=False)
    assert Outline.of(model, "llama").vocab_size == 88


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="want at least 1"):
        Plan(shards=0)


def test_any_model_of_costs_will_do() -> None:
    class Odd:
        def memory(self, plan: Plan) -> RankMemory:
            return RankMemory(base=GIB // plan.tensor, gathered=0, adapters=0, tick=0)

        def rows_per_s(self, plan: Plan) -> float:
            return float(plan.tensor)

    machine = Machine(gpus=4, memory_bytes=2 * GIB)
    assert choose(Odd(), machine, divisor=4)[0].plan == Plan(tensor=4)


LOADS = st.dictionaries(st.sampled_from("abcdefghij"), st.floats(0.01, 100.0), max_size=10)


def filled(loads: dict[str, float], placed: dict[str, tuple[int, ...]], lanes: int) -> list[float]:
    return [sum(loads[name] / len(where) for name, where in placed.items() if lane in where) for lane in range(lanes)]


@given(LOADS, st.integers(1, 6), st.data())
def test_every_job_has_its_lanes(loads: dict[str, float], lanes: int, draw: st.DataObject) -> None:
    where = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True).map(lambda found: tuple(sorted(found)))
    current = draw.draw(st.dictionaries(st.sampled_from("abcdefghijk"), where))
    placed = place(loads, lanes, current)
    assert placed.keys() == loads.keys()
    assert all(where and len(set(where)) == len(where) and set(where) <= set(range(lanes)) for where in placed.values())
    full = filled(loads, placed, lanes)
    mean = sum(loads.values()) / lanes
    assert max(full, default=0.0) <= 2.6 * mean + 1e-9
    assert place(loads, lanes, placed) == placed  # what is in place stays


def test_jobs_move_only_when_it_pays() -> None:
    current = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}
    even = dict.fromkeys("abcd", 1.0)
    assert place(even, 2, current) == current
    assert place({**even, "a": 1.1}, 2, current) == current
    del current["d"], current["c"]
    assert sorted(place({"a": 1.0, "b": 1.0}, 2, current).values()) == [(0,), (1,)]


def test_a_job_of_more_than_its_part_is_split() -> None:
    placed = place({"huge": 30.0, "a": 1.0, "b": 1.0}, 4)
    assert len(placed["huge"]) == 4
    assert len(placed["a"]) == len(placed["b"]) == 1
    assert place({"only": 5.0}, 4) == {"only": (0, 1, 2, 3)}
    assert place({"only": 5.0}, 4, most={"only": 3}) == {"only": (0, 1, 2)}  # no more lanes than sequences
