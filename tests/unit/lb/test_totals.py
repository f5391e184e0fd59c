"""Counters of a rank over all its engines."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.wire.control import Membership, MemberStatus
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase
from lb.views.totals import EXPERTS, RankTotals, Record, Totals, totals_in


def report(engine_id: EngineId, num_steps: int, num_hits: int = 0) -> EngineReport:
    load = Load(num_running=3, num_steps=num_steps, num_prefix_hit_tokens=num_hits)
    return EngineReport(engine_id, 1, 0, 0, 0, 0, EnginePhase.RUNNING, 0, True, {}, load)


def test_a_replaced_engine_goes_on_where_its_predecessors_stopped() -> None:
    totals = RankTotals()
    totals.on_reports([report(EngineId(0, 1), 10, 4), report(EngineId(1, 1), 7)])
    totals.on_reports([report(EngineId(0, 2), 0)])
    assert totals.of_rank(0) == Totals(num_steps=10, num_prefix_hit_tokens=4)
    totals.on_reports([report(EngineId(0, 2), 5, 1)])
    totals.on_reports([report(EngineId(0, 4), 2)])
    assert totals.of_rank(0) == Totals(num_steps=17, num_prefix_hit_tokens=5)
    assert totals.of_rank(1) == Totals(num_steps=7)


def test_a_rank_that_never_reported_has_zeros() -> None:
    assert RankTotals().of_rank(3) == Totals()


def test_a_late_report_of_a_former_life_changes_nothing() -> None:
    totals = RankTotals()
    totals.on_reports([report(EngineId(0, 1), 10), report(EngineId(0, 2), 5), report(EngineId(0, 1), 99)])
    assert totals.of_rank(0).num_steps == 15


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100))))
def test_no_order_of_reports_makes_a_counter_fall(events: list[tuple[int, int]]) -> None:
    totals, last = RankTotals(), 0
    for incarnation, num_steps in events:
        totals.on_reports([report(EngineId(0, incarnation), num_steps)])
        assert totals.of_rank(0).num_steps >= last
        last = totals.of_rank(0).num_steps


def test_every_counter_of_a_report_is_added_up() -> None:
    gauges = {"num_queued", "num_waiting", "num_running", "num_waiting_tokens", "kv_usage"}
    assert {*Totals._fields} == ({*Load.__struct_fields__} - gauges) | {"num_empty_steps", "collective_s"}


def test_what_a_member_counts_goes_on_where_the_engine_before_stopped() -> None:
    records: dict[str, Record] = {}

    def make_record(name: str, num_cells: int) -> Record:
        return records.setdefault(name, [0.0] * num_cells)

    totals = RankTotals(make_record)
    for engine_id, loads, num_empty in ((EngineId(0, 1), [3, 0], 5), (EngineId(0, 2), [1, 4], 1)):
        status = MemberStatus(2, "", Membership(0, []), 0, loads, num_empty, num_empty / 4)
        totals.on_reports([replace(report(engine_id, 0), member=status)])
    assert (totals.of_rank(0).num_empty_steps, totals.of_rank(0).collective_s) == (6, 1.5)
    assert totals_in(records[f"{EXPERTS}0"]) == [4, 4]
    # a report that counts other experts than the record has room for changes those there are
    odd = MemberStatus(3, "", Membership(0, []), expert_loads=[2, 4, 9])
    totals.on_reports([replace(report(EngineId(0, 2), 0), member=odd)])
    assert totals_in(records[f"{EXPERTS}0"]) == [5, 4]
