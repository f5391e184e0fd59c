"""How often a client that says nothing is told that its engine is ready."""

from engine.proc.handshake_retry import HandshakeRetry


def test_it_is_repeated_at_pauses_that_double_up_to_half_a_minute() -> None:
    handshake_retry, told = HandshakeRetry(100.0), []
    for second in range(100, 221):
        assert not handshake_retry.is_due(second - 0.001)
        if handshake_retry.is_due(second):
            told.append(second - 100)
            assert not handshake_retry.is_due(second)
    assert told == [1, 3, 7, 15, 31, 61, 91]
