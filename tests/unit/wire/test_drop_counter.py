"""What is not used is counted without a limit and logged within one."""

import logging

import pytest

from engine.wire.drop_counter import MAX_NAMED_PEERS, DropCounter


def test_each_kind_is_counted_and_logged_once_per_peer(caplog: pytest.LogCaptureFixture) -> None:
    drop_counter = DropCounter()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            drop_counter.drop("malformed_outputs", "the output channel", ValueError("no map"))
            drop_counter.drop("stale_outputs", "0.1")
            drop_counter.drop("stale_outputs", "0.2")
    assert drop_counter.counts == {"malformed_outputs": 3, "stale_outputs": 6}
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "dropped malformed outputs from the output channel: no map",
        "dropped stale outputs from 0.1",
        "dropped stale outputs from 0.2",
    ]


def test_a_scanner_with_ever_new_names_fills_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    drop_counter = DropCounter()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * MAX_NAMED_PEERS):
            drop_counter.drop("malformed_handshakes", str(number))
    assert drop_counter.counts["malformed_handshakes"] == 3 * MAX_NAMED_PEERS
    assert len(caplog.records) == MAX_NAMED_PEERS
