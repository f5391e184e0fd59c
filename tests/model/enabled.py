"""The events that can happen next in a world."""

from collections.abc import Iterator

from engine.wire.states import ReplicaState
from tests.model.parts import Collective, Rank, report_key
from tests.model.world import World

Event = tuple[str, int, int]
"""Name, rank (-1: of none), and which one of several ways."""


class EnabledEvents:
    """Enumerates the events that are possible.

    repeats: states come again, also old ones after new ones.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self.repeats = repeats

    def enabled(self, world: World) -> Iterator[Event]:
        """Yield everything that can happen next."""
        yield from self.faults(world)
        if self.has_news(world):
            yield ("replicas", -1, 0)
        for rank, it in world.ranks.items():
            yield from self.of_rank(world, rank, it)
        for rank, mail in world.mail.items():
            for index in range(len(mail)):
                yield ("recv", rank, index)
        for rank, replica in world.replicas.items():
            if rank not in world.ranks and replica.state is not ReplicaState.DEAD:
                yield ("confirm", rank, 0)

    def faults(self, world: World) -> Iterator[Event]:
        """Yield what comes from outside, and only so often."""
        budget = world.budget
        if budget.restarts:
            yield ("restart", -1, 0)
        if budget.pauses or world.settings % 2:
            yield ("pause", -1, 0)
        if budget.joins:
            yield ("join", -1, 0)
        if budget.rebalances:
            yield ("rebalance", -1, 0)
        if budget.firstreqs and world.coordinator.settings % 2 == 0:
            yield ("firstreq", -1, 0)
        for rank, it in world.ranks.items():
            if budget.requests and it.is_loaded and not it.has_work:
                yield ("request", rank, 0)
            if budget.deaths:
                yield ("die", rank, 0)
                yield ("die", rank, 1)
            if budget.leaves and world.replicas[rank].state is ReplicaState.ALIVE:
                yield ("cordon", rank, 0)
            if budget.returns and world.replicas[rank].state is ReplicaState.LEAVING:
                yield ("restore", rank, 0)
            if budget.cuts and it.place is not None:
                yield ("break", rank, 1)
            if budget.failures and it.is_waited_for and not self._may_fail(world, it):
                yield ("fail", rank, 1)
        if budget.replacements:
            for rank, replica in world.replicas.items():
                if replica.state is ReplicaState.DEAD:
                    yield ("replacement", rank, 0)

    def of_rank(self, world: World, rank: int, it: Rank) -> Iterator[Event]:
        if not it.is_loaded:
            yield ("load", rank, 0)
        if it.has_work and it.place is None:
            yield ("finish", rank, 0)
        mail = world.mail.get(rank, ())
        last = mail[-1] if mail else world.coordinator.reports.get(rank)
        if last is None or report_key(last) != it.report_key():
            yield ("send", rank, 0)
        for number in world.states:
            if number > it.seen or self.repeats:
                yield ("get", rank, number)
        if it.is_waited_for:
            group = world.groups[it.preparing]
            if group.is_met:
                yield ("meet", rank, 0)
            if self._may_fail(world, it):
                yield ("fail", rank, 0)
        if it.place is not None:
            yield from self._in_collective(world, rank, it, it.place)
        if self._may_go(world, rank, it):
            yield ("go", rank, 0)

    def _in_collective(self, world: World, rank: int, it: Rank, place: Collective) -> Iterator[Event]:
        group = world.groups[place.epoch]
        if group.is_complete(place.position):
            yield ("take", rank, 0)
            if place.is_rows and it.has_work and not it.is_paused:
                yield ("take", rank, 1)
        if group.gone:
            yield ("break", rank, 0)
        if it.leaves_below > place.epoch or it.has_lost_peer(world.epochs, place.epoch):
            yield ("leave", rank, 0)

    def _may_fail(self, world: World, it: Rank) -> bool:
        """Tell whether a preparation may come to nothing: it was left, or a member died or went on to another.

        Of a death that the coordinator does not know of only a budget makes use: attempts could fail without end.
        """
        group = world.groups[it.preparing]
        if it.leaves_below > it.preparing:
            return True
        for member in group.membership.members:
            other = world.ranks.get(member.rank)
            if other is None or other.engine_id != member:
                replica = world.coordinator.replicas.get(member.rank)
                if replica is None or replica.engine_id != member or replica.state is ReplicaState.DEAD:
                    return True
            elif member in group.gone or (member not in group.begun and other.preparing >= it.preparing):
                return True
        return False

    def _may_go(self, world: World, rank: int, it: Rank) -> bool:
        """Tell whether a leaving rank may end: the others have gone on without it, and will not count on it again."""
        coordinator = world.coordinator
        if (
            world.replicas[rank].state is not ReplicaState.LEAVING
            or coordinator.replicas.get(rank) != world.replicas[rank]
        ):
            return False
        committed = coordinator.group.committed
        reports = [coordinator.reports.get(member.rank) for member in committed.members]
        return (
            it.engine_id not in committed.members
            and committed.epoch > 0
            and all(report is not None and report.epoch == committed.epoch for report in reports)
        )

    def has_news(self, world: World) -> bool:
        coordinator = world.coordinator
        known = coordinator.settings, coordinator.rebalances
        return coordinator.replicas is not world.replicas or known != (world.settings, world.rebalances)
