"""Experts that are shared out give what they give together, and every member enters as many exchanges as the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.model.expert_weights import find_experts
from engine.parallel.epoch import exchange_headers
from engine.parallel.experts import (
    CallRecorder,
    ExpertsCall,
    ExpertTable,
    SharedExperts,
    _pack,
    _unpack,
    compute_rows,
    replay,
)
from engine.parallel.group_member import StepHeader
from tests.unit.parallel.fake_group import FakeGroup, OutOfStepError
from tests.unit.parallel.members import run_members
from tests.unit.runner.families import FAMILIES

MOE_FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss_sinks"]
CPU = torch.device("cpu")
NUM_STEPS = 5000


def experts_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the experts module of a small random model."""
    torch.manual_seed(3)
    config = FAMILIES[family]()
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    module = next(iter(find_experts(model).values()))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(requires_grad=False)


def choices(num_tokens: int, num_experts: int, k: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return hidden rows, the experts chosen for each, and their weights."""
    torch.manual_seed(num_tokens)
    chosen = torch.stack([torch.randperm(num_experts)[:k] for _ in range(num_tokens)]) if num_tokens else None
    index = torch.zeros(0, k, dtype=torch.int64) if chosen is None else chosen
    return torch.randn(num_tokens, 64).to(dtype), index, torch.rand(num_tokens, k).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_all_experts_in_one_place_give_what_the_library_gives(family: str, dtype: torch.dtype) -> None:
    module = experts_of(family, dtype)
    hidden, index, weights = choices(9, 4, 2, dtype)
    expected = module(hidden, index, weights)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(compute_rows(module, hidden, index, weights), expected, rtol=tolerance, atol=tolerance)


def test_half_precision_is_rounded_once_behind_the_sum() -> None:
    module = experts_of("mixtral", torch.bfloat16)
    hidden, index, weights = choices(40, 4, 4, torch.bfloat16)
    wide = experts_of("mixtral", torch.bfloat16).float()
    exact = compute_rows(wide, hidden.float(), index, weights.float())
    rough = compute_rows(module, hidden, index, weights.float())
    assert rough.dtype == torch.bfloat16
    error, step = (rough.float() - exact).abs().max(), 2**-8 * exact.abs().max()
    assert error < 3 * step, "the products of an expert are rounded, their sum hardly adds to it"


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_rows_left_out_add_nothing_and_the_parts_add_up(family: str) -> None:
    module = experts_of(family)
    hidden, index, weights = choices(9, 4, 2)
    expected = compute_rows(module, hidden, index, weights)
    parts = []
    for held in ([0, 3], [1], [2]):
        part = experts_of(family)
        for parameter in part.parameters():
            parameter.data = parameter.data[held]
        part.num_experts = len(held)
        rows = torch.tensor([held.index(expert) if expert in held else len(held) for expert in range(4)])[index]
        parts.append(compute_rows(part, hidden, rows, weights))
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-5, atol=1e-5)


def test_without_tokens_or_without_experts_there_is_nothing() -> None:
    module = experts_of("mixtral")
    hidden, index, weights = choices(0, 4, 2)
    assert compute_rows(module, hidden, index, weights).shape == (0, 64)
    module.num_experts = 0
    hidden, index, weights = choices(3, 4, 2)
    assert compute_rows(module, hidden, torch.zeros_like(index), weights).abs().sum() == 0


@given(
    num_tokens=st.integers(0, 3),
    width=st.integers(1, 9),
    k=st.integers(1, 5),
    hidden_dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    weights_dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_what_is_packed_is_unpacked_whatever_the_widths(
    num_tokens: int, width: int, k: int, hidden_dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    hidden = torch.randn(num_tokens, width).to(hidden_dtype)
    index = torch.randint(0, 1000, (num_tokens, k))
    weights = torch.rand(num_tokens, k).to(weights_dtype)
    packed = _pack(hidden, index, weights)
    for before, after in zip((hidden, index, weights), _unpack(packed, hidden, index, weights), strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype


@settings(max_examples=30)
@given(st.lists(st.sets(st.integers(0, 7), max_size=8), min_size=1, max_size=4), st.integers(0, 20))
def test_each_choice_of_each_token_is_computed_by_one_member(held: list[set[int]], num_tokens: int) -> None:
    orphans = set(range(8)) - set().union(*held)
    placement = [sorted(experts) for experts in [*held, orphans]]
    torch.manual_seed(num_tokens)
    index = torch.randint(0, 8, (num_tokens, 3))
    claimed = torch.zeros(num_tokens, 3, dtype=torch.int64)
    for member, experts in enumerate(placement):
        table = ExpertTable(placement, member, 8, CPU)
        rows = table.own_rows(index)
        mine = rows < table.num_own
        claimed += mine
        assert torch.equal(torch.tensor(experts, dtype=torch.int64)[rows[mine]], index[mine]), "another expert's row"
    assert bool((claimed == 1).all())


def test_replicas_take_turns() -> None:
    index = torch.zeros(10, 1, dtype=torch.int64)
    shares = [int((ExpertTable([[0], [0]], member, 1, CPU).own_rows(index) == 0).sum()) for member in range(2)]
    assert shares == [5, 5]


def test_an_index_from_elsewhere_that_means_nothing_reads_nothing_out_of_bounds() -> None:
    table = ExpertTable([[0], [1]], 1, 2, CPU)
    assert table.own_rows(torch.tensor([[2**31 - 1], [-(2**31)]])).tolist() == [[0], [1]]


class _Doubler:
    """An experts module as small as can be: each expert doubles."""

    num_experts = 1
    has_gate = has_bias = is_transposed = False
    up_proj = torch.full((1, 1, 1), 2.0)
    down_proj = torch.ones(1, 1, 1)
    act_fn: Any = torch.nn.Identity()


def test_a_member_that_often_has_no_tokens_enters_as_many_exchanges_as_the_others() -> None:
    group = FakeGroup(2)
    placement = [[0], [1]]
    layer = _Doubler()

    def act(index: int) -> list[int]:
        headers, rows = group.transports(index)
        shared = SharedExperts(rows, ExpertTable(placement, index, 2, CPU), index, 2, CPU)
        recorder = CallRecorder()
        recorder.compute(layer, torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
        calls: list[ExpertsCall] = recorder.calls
        with torch.inference_mode():
            for step in range(NUM_STEPS):
                num_tokens = step % 2 if index else 1  # the second member alternates
                seen = exchange_headers(headers, StepHeader(1, 1, step, num_tokens, 1, 1, 0))
                shared.begin([header.num_tokens for header in seen])
                if num_tokens == 0:
                    replay(calls, shared)
                else:
                    mine = torch.full((num_tokens, 1), float(step + index))
                    both = torch.tensor([[0, 1]] * num_tokens)
                    given = shared.compute(layer, mine, both, torch.ones(num_tokens, 2))
                    assert torch.equal(given, 4 * mine), "one expert here and one there"
                shared.end()
        headers.close()
        return shared.loads.tolist()

    assert run_members(2, act) == [[NUM_STEPS] * 2, [NUM_STEPS // 2] * 2]
    group.assert_even()
    assert group.entered[0] == {"headers": NUM_STEPS, "rows": 2 * NUM_STEPS}


class _Traced(_Doubler):
    """Doubles, and logs that it computes."""

    def __init__(self, log: list[str]) -> None:
        self.act_fn = self._trace
        self._log = log

    def _trace(self, hidden: torch.Tensor) -> torch.Tensor:
        self._log.append("compute")
        return hidden


class _TracedTransport:
    """One of two members' transport: logs what is begun and waited for, and receives what it was given before."""

    num_members = 2
    num_entered = 0
    collective_s = 0.0

    def __init__(self, log: list[str], received: Sequence[torch.Tensor]) -> None:
        self._log, self._received = log, received

    def begin(self, rows: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> "_TracedExchange":
        self.num_entered += 1
        self._log.append(f"begin {self.num_entered}")
        received = self._received[self.num_entered - 1]
        assert len(received) == sum(receive_sizes)
        return _TracedExchange(self._log, self.num_entered, received)

    def close(self) -> None:
        raise AssertionError("nobody leaves")


@dataclass(frozen=True, slots=True)
class _TracedExchange:
    log: list[str]
    number: int
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.log.append(f"wait {self.number}")
        return self.received


TOKEN = _pack(torch.ones(1, 1), torch.tensor([[0, 1]]), torch.ones(1, 2))
NO_PARTS = torch.zeros(0, 1)


def take_layers(member: int, transport: Any, layer: Any, num_layers: int) -> None:
    """Go through layers as one of two members, of which the first one alone has a token."""
    shared = SharedExperts(transport, ExpertTable([[0], [1]], member, 2, CPU), member, 2, CPU)
    shared.begin([1, 0])
    num = 1 - member
    both = torch.tensor([[0, 1]])[:num]
    for _ in range(num_layers):
        given = shared.compute(layer, torch.ones(num, 1), both, torch.ones(num, 2))
        assert torch.equal(given, torch.full((num, 1), 4.0))
    shared.end()


def test_who_alone_has_tokens_computes_before_others_have_come() -> None:
    log: list[str] = []
    parts = torch.tensor([[2.0], [2.0]])
    take_layers(0, _TracedTransport(log, [TOKEN, parts, TOKEN, parts]), _Traced(log), 2)
    one_layer = ["begin 1", "compute", "begin 2", "wait 2", "wait 1"]
    assert log[:5] == one_layer, "the exchange that brings nothing is waited for behind the one that brings something"
    assert log[5:] == ["begin 3", "compute", "begin 4", "wait 4", "wait 3"]


def test_who_has_no_tokens_is_at_the_next_layer_before_the_others_have_finished_this_one() -> None:
    log: list[str] = []
    take_layers(1, _TracedTransport(log, [TOKEN, NO_PARTS, TOKEN, NO_PARTS]), _Traced(log), 2)
    assert log[:5] == ["begin 1", "wait 1", "compute", "begin 2", "begin 3"], "nobody waits for parts of no tokens"
    assert log[5:] == ["wait 3", "wait 2", "compute", "begin 4", "wait 4"], "a step that ended was whole for everybody"


def test_a_break_in_the_last_exchange_is_found_at_the_end_of_the_step() -> None:
    group = FakeGroup(2)

    def act(index: int) -> None:
        _, rows = group.transports(index)
        if index == 0:
            token = _pack(torch.ones(1, 1), torch.tensor([[0, 1]]), torch.ones(1, 2))
            rows.begin(token.repeat(2, 1), [1, 1], [1, 0]).wait()
            rows.close()
        else:
            with pytest.raises(OutOfStepError, match="member 1 waits alone"):
                take_layers(1, rows, _Doubler(), 1)

    run_members(2, act)


def test_what_was_under_way_when_a_step_broke_is_waited_for_by_nobody() -> None:
    _, rows = FakeGroup(2).transports(0)
    shared = SharedExperts(rows, ExpertTable([[0], [1]], 0, 2, CPU), 0, 2, CPU)
    shared.begin([1, 0])
    rows.close()
    with pytest.raises(OutOfStepError, match="waits alone"):
        shared.compute(_Doubler(), torch.ones(1, 1), torch.tensor([[0, 1]]), torch.ones(1, 2))
    shared.abandon()
    shared.end()


def test_a_step_that_broke_and_is_taken_again_counts_once() -> None:
    _, rows = FakeGroup(1).transports(0)
    shared = SharedExperts(rows, ExpertTable([[0, 1]], 0, 2, CPU), 0, 2, CPU)
    for is_whole in (False, True):
        shared.begin([1])
        shared.compute(_Doubler(), torch.ones(1, 1), torch.tensor([[1]]), torch.ones(1, 1))
        if is_whole:
            shared.end()
    assert shared.loads.tolist() == [0, 1]


def test_a_member_that_skips_its_empty_steps_is_found_out() -> None:
    """The fault that the test before this one is there for."""
    group = FakeGroup(2)

    def act(index: int) -> None:
        headers, rows = group.transports(index)
        shared = SharedExperts(rows, ExpertTable([[0], [1]], index, 2, CPU), index, 2, CPU)
        seen = exchange_headers(headers, StepHeader(1, 1, 0, 1 - index, 1, 1, 0))
        shared.begin([header.num_tokens for header in seen])
        if index == 0:
            shared.compute(_Doubler(), torch.ones(1, 1), torch.tensor([[0, 1]]), torch.ones(1, 2))
        headers.close()

    with pytest.raises(AssertionError, match="member 0 waits alone in rows"):
        run_members(2, act)
