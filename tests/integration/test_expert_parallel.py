"""Expert-parallel groups of any size: tokens equal to those of transformers, and a share of the experts per member."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import SchedulerConfig
from engine.model import expert_weights, placement
from engine.model.expert_weights import find_experts
from tests.integration.exactness import assert_equal
from tests.integration.expert_group import ExpertGroup
from tests.unit.runner.families import VOCAB_SIZE, generate, load, save_family, without_bars

NUM_PROMPTS, NUM_TOKENS = 10, 6
_RANDOM = random.Random(5)
PROMPTS = [[_RANDOM.randrange(3, VOCAB_SIZE) for _ in range(_RANDOM.choice([1, 4, 9, 17]))] for _ in range(NUM_PROMPTS)]
ALL_PROMPTS = list(range(NUM_PROMPTS))

Reference = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function from a family to its checkpoint and to what transformers answers to the prompts."""

    @cache
    def make(family: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(family)
        save_family(family, folder)
        return folder, generate(folder, PROMPTS, NUM_TOKENS)

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shares(num_members: int, num_busy: int | None = None) -> list[list[int]]:
    """Deal the prompts out at random to the first ``num_busy`` members."""
    rng = random.Random(num_members)
    dealt: list[list[int]] = [[] for _ in range(num_members)]
    for index in ALL_PROMPTS:
        dealt[rng.randrange(num_busy or num_members)].append(index)
    return dealt


def steps_of(num_tokens: int) -> SchedulerConfig:
    return SchedulerConfig(block_size=4, max_num_seqs=6, max_num_batched_tokens=num_tokens)


# Sizes of steps and replicas are combined pairwise over families and groups, not in full.
@pytest.mark.parametrize(
    ("family", "num_members", "num_redundant", "step_tokens"),
    [
        ("qwen3_moe", 1, 0, 64),
        ("qwen3_moe", 2, 0, 7),
        ("qwen3_moe", 3, 1, 1),
        ("qwen3_moe", 4, 2, 64),
        ("mixtral", 1, 0, 7),
        ("mixtral", 2, 1, 64),
        ("mixtral", 3, 0, 7),
        ("mixtral", 4, 2, 1),
        ("olmoe", 1, 0, 1),
        ("olmoe", 2, 2, 7),
        ("olmoe", 3, 0, 64),
        ("olmoe", 4, 1, 7),
        ("gpt_oss_sinks", 2, 1, 7),
    ],
)
def test_greedy_tokens_equal_generate(
    family: str, num_members: int, num_redundant: int, step_tokens: int, reference: Reference
) -> None:
    folder, expected = reference(family)
    with ExpertGroup(folder) as group:
        group.form(range(num_members), num_redundant)
        found = group.answer(PROMPTS, shares(num_members), NUM_TOKENS, steps_of(step_tokens))
        assert_equal(found, expected, PROMPTS, folder)


def test_a_member_that_never_gets_a_request_computes_for_the_others(reference: Reference) -> None:
    folder, expected = reference("olmoe")
    with ExpertGroup(folder) as group:
        group.form(range(3))
        found = group.answer(PROMPTS, shares(3, num_busy=1), NUM_TOKENS, steps_of(7))
        assert_equal(found, expected, PROMPTS, folder)
        loads = [group.runners[rank].expert_loads() for rank in range(3)]
        assert sum(loads[0]) > 0
        assert sum(loads[1] + loads[2]) == 0, "a member without tokens routes none"


def test_there_may_be_more_members_than_experts(reference: Reference) -> None:
    folder, expected = reference("mixtral")
    with ExpertGroup(folder) as group:
        placed = group.form(range(5))
        assert [] in placed
        assert_equal(group.answer(PROMPTS, shares(5), NUM_TOKENS, steps_of(64)), expected, PROMPTS, folder)


@pytest.mark.parametrize(("family", "num_redundant"), [("mixtral", 0), ("gpt_oss_sinks", 1)])
def test_each_member_holds_the_dense_weights_and_its_share(
    family: str, num_redundant: int, reference: Reference
) -> None:
    folder, _ = reference(family)
    full = load(folder)
    num_expert_bytes = sum(p.nbytes for module in find_experts(full).values() for p in module.parameters())
    num_dense_bytes = sum(p.nbytes for p in full.parameters()) - num_expert_bytes
    with ExpertGroup(folder) as group:
        for ranks in ([0, 1], [0, 1, 2], [2, 1]):  # one joins, one leaves: rank 0
            placed = group.form(ranks, num_redundant)
            num_experts = group.runners[1].num_experts
            for rank, experts in zip(ranks, placed, strict=True):
                share = num_expert_bytes // num_experts * len(experts)
                assert group.num_bytes(rank) == num_dense_bytes + share
                assert group.runners[rank].rows.num_bytes == share


def test_a_joining_member_gets_its_experts_from_its_peers_and_the_tokens_stay_the_same(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = reference("qwen3_moe")
    with ExpertGroup(folder) as group:
        group.form([0, 1])
        group.load(2)
        group.load(3)
        monkeypatch.setattr(expert_weights, "safe_open", _refuse)
        for ranks in ([0, 1, 2], [3, 0, 1, 2]):
            group.form(ranks)
            found = group.answer(PROMPTS, shares(len(ranks)), NUM_TOKENS, steps_of(64))
            assert_equal(found, expected, PROMPTS, folder)


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the checkpoint is read although a peer has what is wanted")


@pytest.mark.parametrize("level", [1, 2])
def test_a_group_that_has_slept_gives_the_same_tokens(level: int, reference: Reference) -> None:
    folder, expected = reference("qwen3_moe")
    with ExpertGroup(folder) as group:
        placed = group.form([0, 1], num_redundant=1)
        for runner in group.runners.values():
            runner.sleep(level)
            assert runner.rows.num_bytes == 0
        for runner in group.runners.values():
            with without_bars():
                runner.wake_up(lambda what, share: None)
        assert [list(runner.rows.expert_ids) for runner in group.runners.values()] == placed
        found = group.answer(PROMPTS, shares(2, num_busy=1), NUM_TOKENS, steps_of(7))
        assert_equal(found, expected, PROMPTS, folder)


def test_a_member_whose_group_changes_while_it_sleeps_wakes_with_the_new_experts(reference: Reference) -> None:
    folder, expected = reference("qwen3_moe")
    with ExpertGroup(folder) as group:
        group.form([0, 1])
        group.runners[0].sleep(2)
        placed = group.form([0, 1, 2])
        assert group.runners[0].rows.num_bytes == 0
        with without_bars():
            group.runners[0].wake_up(lambda what, share: None)
        assert list(group.runners[0].rows.expert_ids) == placed[0]
        found = group.answer(PROMPTS, shares(3), NUM_TOKENS, steps_of(64))
        assert_equal(found, expected, PROMPTS, folder)


def test_a_group_prepared_in_sleep_takes_no_memory_before_its_member_wakes(reference: Reference) -> None:
    folder, expected = reference("qwen3_moe")
    with ExpertGroup(folder) as group:
        placed = group.form([0, 1])
        runner = group.runners[0]
        assert group.in_use(0).experts is None, "only the runner holds them"
        runner.sleep(1)
        prepared = runner.load_rows(placed[0])
        assert prepared.num_bytes == 0
        with without_bars():
            runner.wake_up(lambda what, share: None)
        runner.join(prepared, placed, 0, group.in_use(0).rows)
        found = group.answer(PROMPTS, shares(2), NUM_TOKENS, steps_of(64))
        assert_equal(found, expected, PROMPTS, folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_in_double_precision_there_is_no_margin(
    family: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounding is far below every difference of two logits, however experts lie, the tokens are the same."""
    monkeypatch.setitem(placement._DTYPES, "float64", torch.float64)  # the product does not serve in it
    folder, _ = reference(family)
    with without_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    model.generation_config.eos_token_id = None
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    settings = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    expected = [
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :].tolist()
        for prompt in ids
    ]
    with ExpertGroup(folder, "float64") as group:
        group.form(range(3), num_redundant=1)
        assert group.answer(PROMPTS, shares(3), NUM_TOKENS, steps_of(7)) == expected
