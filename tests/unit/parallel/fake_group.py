"""A collective that fails on any difference between members, and counts: for what must never get out of step.

A real all-to-all whose members differ in what they enter hangs. This one knows what each brings, and says.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PATIENCE_S = 20.0
_KEPT_ROUNDS = 8  # more than members may be apart


@dataclass(frozen=True, slots=True)
class _Brought:
    channel: str
    rows: torch.Tensor
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]

    def part(self, receiver: int) -> torch.Tensor:
        return self.rows.split(self.send_sizes)[receiver]  # type: ignore[no-untyped-call, no-any-return]


class OutOfStepError(AssertionError):
    """Members entered different collectives, or not as many."""


class FakeGroup:
    """Meeting point of members that are threads. entered: by channel, how many exchanges each member began."""

    def __init__(self, num_members: int) -> None:
        self.entered: list[Counter[str]] = [Counter() for _ in range(num_members)]
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, _Brought]] = {}
        self._received: dict[int, list[torch.Tensor]] = {}
        self._error: OutOfStepError | None = None
        self._num_left = 0

    def transports(self, index: int) -> tuple["FakeTransport", "FakeTransport"]:
        """Return a member's transports for headers and for rows."""
        return FakeTransport(self, index, "headers"), FakeTransport(self, index, "rows")

    def leave(self) -> None:
        """Note that a member enters nothing any more; who waits for it fails at once."""
        with self._changed:
            self._num_left += 1
            self._changed.notify_all()

    def assert_even(self) -> None:
        """Fail unless all members entered the same exchanges."""
        assert all(counts == self.entered[0] for counts in self.entered), self.entered

    def begin(self, index: int, brought: _Brought) -> int:
        """Hold what a member brings against what the others bring into the same round; return the round's number."""
        with self._changed:
            number = self.entered[index].total()
            self.entered[index][brought.channel] += 1
            company = self._rounds.setdefault(number, {})
            company[index] = brought
            if len(company) == len(self.entered):
                self._conclude(number)
            return number

    def wait(self, index: int, number: int) -> torch.Tensor:
        """Wait until all have brought something into a round, and return a member's share."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._received or self._error or self._num_left, PATIENCE_S)
            if self._error is not None:
                raise self._error
            if number not in self._received:
                channel = self._rounds[number][index].channel
                raise OutOfStepError(f"member {index} waits alone in {channel}: entered {self.entered}")
            return self._received[number][index]

    def _conclude(self, number: int) -> None:
        company = self._rounds.pop(number)
        everybody = [company[index] for index in range(len(self.entered))]
        self._error = self._error or self._judge(everybody)
        if self._error is None:
            self._received[number] = [
                torch.cat([sender.part(receiver) for sender in everybody]) for receiver in range(len(everybody))
            ]
            self._received.pop(number - _KEPT_ROUNDS, None)
        self._changed.notify_all()

    def _judge(self, everybody: Sequence[_Brought]) -> OutOfStepError | None:
        for what in ("channel", "width", "dtype"):
            seen = [_fact(brought, what) for brought in everybody]
            if len(set(seen)) > 1:
                return OutOfStepError(f"members differ in {what}: {seen}, entered {self.entered}")
        for sender, sent in enumerate(everybody):
            for receiver, expecting in enumerate(everybody):
                if sent.send_sizes[receiver] != expecting.receive_sizes[sender]:
                    return OutOfStepError(
                        f"member {sender} sends {sent.send_sizes[receiver]} rows to {receiver}, "
                        f"who expects {expecting.receive_sizes[sender]}"
                    )
        return None


class FakeTransport:
    """One member's end of a channel of a ``FakeGroup``; implements ``engine.parallel.transport.Transport``."""

    collective_s = 0.0

    def __init__(self, group: FakeGroup, index: int, channel: str) -> None:
        self.num_members = len(group.entered)
        self._group = group
        self._index = index
        self._channel = channel

    @property
    def num_entered(self) -> int:
        """Return how many exchanges this member began here."""
        return self._group.entered[self._index][self._channel]

    @num_entered.setter
    def num_entered(self, number: int) -> None:
        raise AttributeError("the group counts")

    def begin(self, rows: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> "_FakeExchange":
        """See ``Transport``."""
        assert len(rows) == sum(send_sizes)
        brought = _Brought(self._channel, rows, tuple(send_sizes), tuple(receive_sizes))
        return _FakeExchange(self._group, self._index, self._group.begin(self._index, brought))

    def close(self) -> None:
        """Enter nothing any more."""
        self._group.leave()


@dataclass(frozen=True, slots=True)
class _FakeExchange:
    group: FakeGroup
    index: int
    number: int

    def wait(self) -> torch.Tensor:
        """See ``Exchange``.

        Raises:
            OutOfStepError: another member entered something else, or nothing.
        """
        return self.group.wait(self.index, self.number)


def _fact(brought: _Brought, what: str) -> object:
    facts = {"channel": brought.channel, "width": brought.rows.shape[1:], "dtype": brought.rows.dtype}
    return facts[what]
