"""Which engines can be spoken to, as their handshakes and the news of their ends come in any order."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from client.connection_table import (
    MAX_EARLY_ENGINES,
    MAX_EARLY_FRAMES,
    MAX_REMEMBERED_ENGINES,
    Closed,
    ConnectionTable,
    Gone,
    Opened,
    OwnBuild,
    Refused,
)
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutputs, EngineReady
from engine.wire.tensors import Buffer
from tests.unit.client.builders import CLIENT, make_ready

E0 = EngineId(0, 1)
OWN = OwnBuild("build", "hash", {"dtype": "float32"})


class Table(ConnectionTable):
    """A table and what it counted."""

    def __init__(self, own: OwnBuild | None = OWN) -> None:
        self.counts: Counter[str] = Counter()
        self.drops = DropCounter()
        super().__init__(own, self.counts, self.drops)

    def ready(self, rank: int = 0, incarnation: int = 1, **changes: Any) -> list[object]:
        """Let an engine shake hands."""
        return list(self.on_ready(replace(make_ready(rank, incarnation), **changes), 0.0))

    def early(self, engine_id: EngineId, frames: list[Buffer], dead: str | None = None) -> list[object]:
        """Let an engine send before it has shaken hands."""
        return list(self.on_unknown_outputs(EngineCoreOutputs(engine_id, CLIENT, 1, 0, 0, [], dead=dead), frames))


def test_a_handshake_opens_a_connection() -> None:
    table = Table()
    (opened,) = table.ready()
    assert isinstance(opened, Opened)
    assert table.connections == {E0: opened.connection}
    assert table.only() is opened.connection


def test_before_any_handshake_there_is_nobody_to_speak_to() -> None:
    with pytest.raises(OverloadedError):
        Table().only()


def test_a_new_incarnation_ends_the_connection_to_the_old_one_first_and_the_old_one_is_gone() -> None:
    table = Table()
    (first,) = table.ready()
    closed, opened = table.ready(incarnation=2)
    assert isinstance(first, Opened)
    assert closed == Closed(first.connection, "0.2 replaced it", restarted=False)
    assert isinstance(opened, Opened)
    assert list(table.connections) == [EngineId(0, 2)]
    assert table.gone == {E0: "0.2 replaced it"}


def test_the_same_engine_that_begins_anew_is_not_gone() -> None:
    table = Table()
    (first,) = table.ready(channel_number=1)
    closed, opened = table.ready(channel_number=2)
    assert isinstance(first, Opened)
    assert closed == Closed(first.connection, "it began anew", restarted=True)
    assert isinstance(opened, Opened)
    assert opened.connection is not first.connection
    assert table.gone == {}


def test_a_repeated_handshake_changes_nothing() -> None:
    table = Table()
    table.ready(channel_number=3)
    connection = table.only()
    assert table.ready(channel_number=3) == table.ready(channel_number=2) == []
    assert table.only() is connection
    assert table.counts["repeated_handshakes"] == 2


def test_a_handshake_of_a_dead_engine_or_of_a_predecessor_is_stale() -> None:
    table = Table()
    table.on_gone(E0, "killed")
    assert table.ready() == []
    table.ready(rank=1, incarnation=5)
    assert table.ready(rank=1, incarnation=4) == []
    assert table.drops.counts["stale_handshakes"] == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"build_id": "9.9"}, "its build is 9.9, ours is build"),
        (
            {"config_hash": "other", "config": {"dtype": "bfloat16"}},
            "its configuration is other, ours is hash; its dtype is bfloat16, ours is float32",
        ),
    ],
)
def test_an_engine_of_another_build_or_configuration_is_refused_until_its_rank_has_another(
    changes: dict[str, Any], why: str
) -> None:
    table = Table()
    assert table.ready(**changes) == [Refused(E0, f"refused: {why}")]
    assert table.describe_missing() == [f"engine 0.1: refused: {why}"]
    assert table.connections == {}
    table.ready(incarnation=2)
    assert table.refused == {}


def test_engines_of_this_process_are_not_compared() -> None:
    assert len(Table(own=None).ready(build_id="whatever")) == 1


def test_an_end_is_news_once_whether_or_not_the_engine_had_shaken_hands() -> None:
    table = Table()
    (opened,) = table.ready()
    assert isinstance(opened, Opened)
    assert table.on_gone(E0, "killed") == [Closed(opened.connection, "killed", restarted=False)]
    assert table.on_gone(E0, "killed again") == []
    unknown = EngineId(7, 1)
    assert table.on_gone(unknown, "died at birth") == [Gone(unknown, "died at birth")]
    assert table.gone == {E0: "killed", unknown: "died at birth"}


def test_leaving_engines_are_not_ready_ones() -> None:
    table = Table()
    table.ready()
    table.ready(rank=1)
    table.only().leaving = True
    assert table.num_ready == 1


def test_outputs_that_overtook_the_handshake_are_kept_in_order_and_handed_out_once() -> None:
    table = Table()
    assert table.early(E0, [b"first"]) == table.early(E0, [b"second"]) == []
    assert table.statistics()["early_outputs"] == 2
    assert table.take_early(E0) == [[b"first"], [b"second"]]
    assert table.take_early(E0) == []


def test_last_words_of_an_unknown_engine_count_at_once_and_what_was_kept_of_it_is_dropped() -> None:
    table = Table()
    table.early(E0, [b"first"])
    assert table.early(E0, [b"last"], dead="out of memory") == [Gone(E0, "out of memory")]
    assert table.early(E0, [b"behind them"]) == []
    assert table.take_early(E0) == []
    assert table.drops.counts["stale_outputs"] == 1


def test_what_unknown_engines_can_make_a_client_keep_is_bounded() -> None:
    table = Table()
    for rank in range(2 * MAX_EARLY_ENGINES):
        for _ in range(2 * MAX_EARLY_FRAMES):
            table.early(EngineId(rank, 1), [b"x"])
        table.on_gone(EngineId(MAX_EARLY_ENGINES * 2 + rank, 1), "gone")
    assert table.statistics()["early_outputs"] == MAX_EARLY_ENGINES * MAX_EARLY_FRAMES
    for rank in range(2 * MAX_REMEMBERED_ENGINES):
        table.on_gone(EngineId(rank, 1), "gone")
        table.ready(rank=10_000 + rank, build_id="other")
    assert len(table.gone) == len(table.refused) == MAX_REMEMBERED_ENGINES


def test_a_handshake_holds_what_the_engine_told() -> None:
    ready: EngineReady = make_ready(3)
    table = Table()
    table.on_ready(ready, 0.0)
    assert table.only().ready is ready
