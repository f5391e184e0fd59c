"""Names stay unambiguous: across engines, clients, restarts and hostile identity frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.ids import ClientId, EngineId, RequestIds

UINT32 = st.integers(0, 2**32 - 1)


@given(UINT32, UINT32)
def test_an_identity_names_its_engine(rank: int, incarnation: int) -> None:
    engine_id = EngineId(rank, incarnation)
    assert EngineId.from_identity(engine_id.to_identity()) == engine_id


@given(st.binary(max_size=12))
def test_a_foreign_identity_names_nobody_or_is_exactly_ours(identity: bytes) -> None:
    engine_id = EngineId.from_identity(identity)
    assert engine_id is None or engine_id.to_identity() == identity


def test_no_identity_begins_with_a_zero_byte() -> None:  # ZeroMQ keeps those for itself
    assert EngineId(0, 0).to_identity()[0] != 0


def test_a_later_engine_of_a_rank_sorts_behind_the_earlier_one() -> None:
    assert EngineId(1, 1) < EngineId(1, 2) < EngineId(2, 1)
    assert str(EngineId(1, 2)) == "1.2"


def test_no_two_clients_draw_the_same_request_id() -> None:
    clients = [ClientId(index, incarnation) for index in (0, 1, 63, 4095) for incarnation in (1, 2, 4095)]
    drawn = [ids.draw() for ids in map(RequestIds, clients) for _ in range(100)]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) < 2**64


def test_a_client_index_beyond_its_bits_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        RequestIds(ClientId(4096, 1))
