"""The placement of experts on the members of a lockstep group. Pure: the same arguments give the same placement.

Every expert has one copy at least. Further copies, *redundant experts*, share its tokens; no member holds two of one.
"""

from collections.abc import Iterator, Sequence

_WORTH_A_MOVE = 0.01
"""Share of a fair load that an exchange of experts must take off a busy member: weights cost time to load."""

Placement = list[list[int]]
"""Expert ids of each member, ascending; an expert may be held by several members, by none twice."""


def place_experts(
    num_experts: int,
    previous: Sequence[Sequence[int]],
    num_redundant: int = 0,
    loads: Sequence[float] | None = None,
) -> Placement:
    """Share experts out: as many to each member, give or take one, and hardly more of them moved than that takes.

    With one copy of each no other placement moves fewer; with more the copies that stay are chosen greedily.

    previous: what each member of the new group holds already, in the order of the members; empty for one that joins.
    num_redundant: copies beside the first of each expert, given to the experts with the most load; more than the
        members can hold are left out.
    loads: tokens each expert was chosen for; when given, members are evened out by load and not only by number, with
        as few moves as make a difference.

    Raises:
        ValueError: there is no member.
    """
    num_members = len(previous)
    if num_members == 0:
        raise ValueError("a group has at least one member")
    weights = [max(0.0, load) for load in loads] if loads is not None else [1.0] * num_experts
    copies = _copies(weights, max_redundant(num_experts, num_members, num_redundant), num_members)
    shares = [weight / count for weight, count in zip(weights, copies, strict=True)]
    placer = _Placer(copies, shares, num_members)
    placer.keep(previous)
    placer.fill()
    if loads is not None:
        placer.even_out()
    return [sorted(held) for held in placer.held]


def max_redundant(num_experts: int, num_members: int, num_redundant: int) -> int:
    """Return how many of ``num_redundant`` further copies so many members can hold: none holds an expert twice."""
    return min(num_redundant, num_experts * (num_members - 1))


def num_moved(previous: Sequence[Sequence[int]], placement: Placement) -> int:
    """Return how many copies a placement makes some member load that it did not hold before."""
    return sum(len(set(new) - set(old)) for old, new in zip(previous, placement, strict=True))


class _Placer:
    """Copies still to be placed, and the room members have left: some may hold one more than the others."""

    def __init__(self, copies: list[int], shares: list[float], num_members: int) -> None:
        self.held: list[set[int]] = [set() for _ in range(num_members)]
        self._left = copies
        self._shares = shares
        self._size, self._num_larger = divmod(sum(copies), num_members)
        self._loads = [0.0] * num_members
        self._fair = sum(copy * share for copy, share in zip(copies, shares, strict=True)) / num_members

    def keep(self, previous: Sequence[Sequence[int]]) -> None:
        """Leave experts where they are as long as there is room: those first that the fewest members hold."""
        holders = [[m for m, experts in enumerate(previous) if expert in experts] for expert in range(len(self._left))]
        for expert in sorted(range(len(holders)), key=lambda e: (len(holders[e]), -self._shares[e], e)):
            for member in sorted(holders[expert], key=lambda m: (len(self.held[m]), m)):
                if self._left[expert] and self._has_room(member):
                    self._put(expert, member)

    def fill(self) -> None:
        """Give what is left, the busiest first, to the least busy members with room."""
        rest = [expert for expert, left in enumerate(self._left) for _ in range(left)]
        for expert in sorted(rest, key=lambda e: (-self._shares[e], e)):
            fitting = [m for m, held in enumerate(self.held) if self._has_room(m) and expert not in held]
            if fitting:
                self._put(expert, min(fitting, key=lambda m: (self._loads[m], m)))
            else:
                self._make_room(expert)

    def even_out(self) -> None:
        """Let the busiest member change experts with another, as long as that takes enough off the busier of the two.

        Each exchange lowers the sum of the squares of the loads, so this ends.
        """
        while exchange := self._best_exchange():
            busiest, other, given, taken = exchange
            self._take(given, busiest)
            if taken is not None:
                self._take(taken, other)
                self._put(taken, busiest)
            self._put(given, other)

    def _best_exchange(self) -> tuple[int, int, int, int | None] | None:
        """Return (busiest member, other member, expert given, expert taken for it): the first other that helps."""
        by_load = sorted(range(len(self.held)), key=lambda m: (self._loads[m], m))
        busiest = by_load[-1]
        for other in by_load[:-1]:
            gap = self._loads[busiest] - self._loads[other]
            options = [
                (abs(gap - 2 * change), given, taken) for change, given, taken in self._exchanges(busiest, other)
            ]
            left, given, taken = min(options, key=lambda o: o[0], default=(gap, 0, None))
            if gap - left > 2 * _WORTH_A_MOVE * self._fair:  # what the busier of the two loses is half of it
                return busiest, other, given, taken
        return None

    def _exchanges(self, giver: int, taker: int) -> Iterator[tuple[float, int, int | None]]:
        """Yield (load that goes over, expert given, expert taken); none is taken where the giver holds one more."""
        only_there = sorted(self.held[taker] - self.held[giver])
        for given in sorted(self.held[giver] - self.held[taker]):
            if len(self.held[giver]) > len(self.held[taker]):
                yield self._shares[given], given, None
            for taken in only_there:
                yield self._shares[given] - self._shares[taken], given, taken

    def _make_room(self, expert: int) -> None:
        """Place a copy whose every member with room holds one: somebody else's expert goes there instead."""
        with_room = next(m for m in range(len(self.held)) if self._has_room(m))
        for member, held in enumerate(self.held):
            movable = held - self.held[with_room]
            if expert not in held and movable:
                other = min(movable)
                self._take(other, member)
                self._put(other, with_room)
                self._put(expert, member)
                return
        raise AssertionError("copies are at most members, so some member lacks this expert")

    def _has_room(self, member: int) -> bool:
        return len(self.held[member]) < self._size + (self._num_larger > 0)

    def _put(self, expert: int, member: int) -> None:
        self._num_larger -= len(self.held[member]) == self._size
        self.held[member].add(expert)
        self._left[expert] -= 1
        self._loads[member] += self._shares[expert]

    def _take(self, expert: int, member: int) -> None:
        self.held[member].remove(expert)
        self._num_larger += len(self.held[member]) == self._size
        self._left[expert] += 1
        self._loads[member] -= self._shares[expert]


def _copies(weights: Sequence[float], num_redundant: int, num_members: int) -> list[int]:
    """Return the copies of each expert: each further one goes to the expert whose copies are the busiest."""
    copies = [1] * len(weights)
    for _ in range(num_redundant):
        candidates = [expert for expert, count in enumerate(copies) if count < num_members]
        copies[max(candidates, key=lambda e: (weights[e] / copies[e], -e))] += 1
    return copies
