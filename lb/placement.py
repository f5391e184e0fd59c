"""Which member of a lockstep group holds which experts. Pure: the same arguments give the same placement everywhere."""

from collections.abc import Sequence

Placement = list[list[int]]
"""Expert ids of each member, ascending; an expert may be held by several members (replicas), by none twice."""


def place_experts(
    num_experts: int,
    previous: Sequence[Sequence[int]],
    num_redundant: int = 0,
    loads: Sequence[float] | None = None,
) -> Placement:
    """Share experts out: as many to each member, give or take one, and as few of them moved as that allows.

    previous: what each member of the new group holds already, in the order of the members; empty for one that joins.
    num_redundant: replicas beside the first copy of each expert, given to the experts with the most load.
    loads: tokens each expert was chosen for; when given, members are evened out by load and not only by number.

    Raises:
        ValueError: there is no member, or more copies of an expert are asked for than there are members.
    """
    num_members = len(previous)
    if num_members == 0:
        raise ValueError("a group has at least one member")
    if num_redundant > num_experts * (num_members - 1):
        raise ValueError(
            f"num_redundant_experts={num_redundant}: {num_members} members cannot hold so many more of {num_experts}"
        )
    weights = [max(0.0, load) for load in loads] if loads is not None else [1.0] * num_experts
    copies = _copies(weights, num_redundant, num_members)
    shares = [weight / count for weight, count in zip(weights, copies, strict=True)]
    placer = _Placer(copies, shares, _capacities(sum(copies), previous))
    placer.keep(previous, by_load=loads is not None)
    placer.fill()
    return [sorted(held) for held in placer.held]


def num_moved(previous: Sequence[Sequence[int]], placement: Placement) -> int:
    """Return how many copies a placement makes some member load that it did not hold before."""
    return sum(len(set(new) - set(old)) for old, new in zip(previous, placement, strict=True))


class _Placer:
    """Copies still to be placed, and the room members have left."""

    def __init__(self, copies: list[int], shares: list[float], capacities: list[int]) -> None:
        self.held: list[set[int]] = [set() for _ in capacities]
        self._left = copies
        self._shares = shares
        self._room = capacities
        self._loads = [0.0] * len(capacities)
        self._fair = sum(copy * share for copy, share in zip(copies, shares, strict=True)) / len(capacities)

    def keep(self, previous: Sequence[Sequence[int]], *, by_load: bool) -> None:
        """Leave experts where they are, the busiest first, as long as there is room and no member gets too much."""
        for member, experts in enumerate(previous):
            for expert in sorted(set(experts), key=lambda e: (-self._shares[e], e)):
                fits = not by_load or not self.held[member] or self._loads[member] + self._shares[expert] <= self._fair
                if self._left[expert] and self._room[member] and fits:
                    self._put(expert, member)

    def fill(self) -> None:
        """Give what is left, the busiest first, to the least busy members with room."""
        rest = [expert for expert, left in enumerate(self._left) for _ in range(left)]
        for expert in sorted(rest, key=lambda e: (-self._shares[e], e)):
            fitting = [m for m, held in enumerate(self.held) if self._room[m] and expert not in held]
            if fitting:
                self._put(expert, min(fitting, key=lambda m: (self._loads[m], m)))
            else:
                self._make_room(expert)

    def _make_room(self, expert: int) -> None:
        """Place a copy whose every member with room holds one: somebody else's expert goes there instead."""
        with_room = next(m for m, room in enumerate(self._room) if room)
        for member, held in enumerate(self.held):
            movable = held - self.held[with_room]
            if expert not in held and movable:
                other = min(movable)
                self._take(other, member)
                self._put(other, with_room)
                self._put(expert, member)
                return
        raise AssertionError("copies are at most members, so some member lacks this expert")

    def _put(self, expert: int, member: int) -> None:
        self.held[member].add(expert)
        self._left[expert] -= 1
        self._room[member] -= 1
        self._loads[member] += self._shares[expert]

    def _take(self, expert: int, member: int) -> None:
        self.held[member].remove(expert)
        self._left[expert] += 1
        self._room[member] += 1
        self._loads[member] -= self._shares[expert]


def _copies(weights: Sequence[float], num_redundant: int, num_members: int) -> list[int]:
    """Return the copies of each expert: each further one goes to the expert whose copies are the busiest."""
    copies = [1] * len(weights)
    for _ in range(num_redundant):
        candidates = [expert for expert, count in enumerate(copies) if count < num_members]
        copies[max(candidates, key=lambda e: (weights[e] / copies[e], -e))] += 1
    return copies


def _capacities(num_copies: int, previous: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of each member; the odd ones go to those that hold the most, so that less moves."""
    base, odd = divmod(num_copies, len(previous))
    by_size = sorted(range(len(previous)), key=lambda m: (-len(previous[m]), m))
    return [base + (by_size.index(member) < odd) for member in range(len(previous))]
