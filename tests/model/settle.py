"""Liveness: a world comes to rest when nothing more goes wrong and everything arrives."""

from engine.wire.ids import EngineId
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import LockstepState, ReplicaState
from tests.model.events import Rules
from tests.model.parts import report_key
from tests.model.world import ViolationError, World

MAX_ROUNDS = 30


class Settler:
    """Runs worlds fairly until they are at rest. Worlds that were found to come to rest are remembered.

    A round lets every death be confirmed, every report and state arrive, every preparation end and every rank take
    what it waits for; work ends with the next step. Nothing is sent twice: the newest state arrives, and that must
    suffice.

    When states were lost, those that were published before never arrive. They are published again while the
    coordinator thinks that a rank may not have seen them, and that must suffice.

    When joining ranks are mute, nothing comes from ranks that are in no group, and the members must come to rest alone.
    """

    def __init__(
        self, rules: Rules, *, is_backwards: bool = False, are_lost: bool = False, are_joining_mute: bool = False
    ) -> None:
        """is_backwards: ranks take their turns in falling order. are_lost: states on the way are lost."""
        self._rules = rules
        self._is_backwards = is_backwards
        self._are_lost = are_lost
        self._are_joining_mute = are_joining_mute
        self._good: set[int] = set()

    def check(self, world: World) -> None:
        """Run a copy of a world until it is at rest, and a paused one once more after the resume.

        Raises:
            ViolationError: it is not at rest after so many rounds, or a rule of safety broke on the way.
        """
        passed = []
        following = world.copy()
        if self._are_lost:
            for rank in following.ranks:
                following.own_rank(rank).seen = world.num_states - 1
        for _ in range(MAX_ROUNDS):
            key = following.key()
            if key in self._good:
                break
            passed.append(key)
            if self._unrest(following) is None:
                if following.settings % 2 == 0:
                    break
                self._rules.happen(following, ("pause", -1, 0))
            self.round(following)
        else:
            raise ViolationError(f"never at rest: {self._unrest(following)}")
        self._good.update(passed)

    def settled(self, world: World) -> World:
        """Run a world until it is at rest, and return it.

        Raises:
            ViolationError: it is not after so many rounds.
        """
        for _ in range(MAX_ROUNDS):
            if self._unrest(world) is None:
                return world
            self.round(world)
        raise ViolationError(f"never at rest: {self._unrest(world)}")

    def _unrest(self, world: World) -> str | None:
        check = unrest_of_members if self._are_joining_mute else unrest
        return check(world, self._rules.min_size)

    def round(self, world: World) -> None:
        """Let everything arrive once, and every rank do what it can."""
        rules = self._rules
        for rank, replica in list(world.replicas.items()):
            if rank not in world.ranks and replica.state is not ReplicaState.DEAD:
                rules.happen(world, ("confirm", rank, 0))
        self._replace(world)
        if rules.has_news(world):
            rules.happen(world, ("replicas", -1, 0))
        self._report(world)
        if self._are_lost and not world.coordinator.group.is_observed:
            rules.publish(world)
        order = sorted(world.ranks, reverse=self._is_backwards)
        for rank in order:
            if not self._is_mute(world, rank):
                self._turn(world, rank)

    def _is_mute(self, world: World, rank: int) -> bool:
        it, members = world.ranks[rank], world.coordinator.group.committed.members
        is_joining = it.member.lockstep_state is LockstepState.OUTSIDE and it.engine_id not in members
        return self._are_joining_mute and is_joining

    def _replace(self, world: World) -> None:
        """Replace dead replicas when those that live are too few."""
        replicas = world.replicas.items()
        if sum(replica.state is not ReplicaState.DEAD for _, replica in replicas) < self._rules.min_size:
            for rank in [rank for rank, replica in replicas if replica.state is ReplicaState.DEAD]:
                world.budget = world.budget._replace(replacements=world.budget.replacements + 1)
                self._rules.happen(world, ("replacement", rank, 0))

    def _report(self, world: World) -> None:
        for rank, it in sorted(world.ranks.items()):
            known = world.coordinator.reports.get(rank)
            report = it.report()
            is_news = known is None or report_key(known) != report_key(report) or rank in world.mail
            if is_news and not self._is_mute(world, rank):
                world.mail[rank] = (report,)
                self._rules.happen(world, ("recv", rank, 0))
        world.mail.clear()

    def _turn(self, world: World, rank: int) -> None:
        """Let one rank do all it can before it must wait for another."""
        rules = self._rules
        for _ in range(8):
            if rank not in world.ranks:
                return
            it = world.ranks[rank]
            names = {name: way for name, _, way in rules.of_rank(world, rank, it) if name != "get" or way > it.seen}
            for name in ("load", "get", "leave", "meet", "take", "break", "fail", "go"):
                if name in names:
                    rules.happen(world, (name, rank, names[name]))
                    break
            else:
                return


def settlers(rules: Rules) -> list[Settler]:
    """Return one of each kind."""
    return [
        Settler(rules),
        Settler(rules, is_backwards=True, are_lost=True),
        Settler(rules, are_joining_mute=True),
    ]


def unrest(world: World, min_size: int) -> str | None:
    """Return what is not at rest, or None."""
    group = world.coordinator.group
    wanted = sorted(replica.engine_id for rank, replica in world.replicas.items() if _is_wanted(world, rank, replica))
    inside = [rank for rank, it in world.ranks.items() if it.place is not None]
    if inside:
        return f"ranks {inside} are in a collective"
    if any(engine_id.rank not in world.ranks for engine_id in wanted):
        return "a death is not confirmed"
    if len(wanted) < min_size:
        return None
    if group.proposal is not None:
        return f"epoch {group.proposal.epoch} is still proposed"
    if wanted and group.committed.members != wanted:
        return f"members are {group.committed.members}, not {wanted}"
    if wanted and group.committed.rebalance_seq != world.rebalances:
        return f"experts were placed anew {group.committed.rebalance_seq} times, not {world.rebalances}"
    return _unrest_of(wanted, world)


def unrest_of_members(world: World, min_size: int) -> str | None:
    """Return what is not at rest in the committed group, whatever else there may be; None if nothing, or it is none."""
    members = world.coordinator.group.committed.members
    live = [engine_id for engine_id in members if _lives(world, engine_id)]
    if len(live) < min_size:
        return None
    return f"members are {members}, not {live}" if len(live) < len(members) else _unrest_of(members, world)


def _lives(world: World, engine_id: EngineId) -> bool:
    return engine_id.rank in world.ranks and world.ranks[engine_id.rank].engine_id == engine_id


def _unrest_of(members: list[EngineId], world: World) -> str | None:
    group = world.coordinator.group
    for engine_id in members:
        it = world.ranks[engine_id.rank]
        member = it.member
        if member.lockstep_state is not LockstepState.IDLE or member.epoch != group.committed.epoch:
            return f"rank {engine_id} is {member.lockstep_state.value} in epoch {member.epoch}"
        if member.wave != group.waves.started:
            return f"rank {engine_id} rests in wave {member.wave} of {group.waves.started}"
        if it.has_work and not it.is_paused:
            return f"rank {engine_id} has work and rests"
    return None


def _is_wanted(world: World, rank: int, replica: ReplicaInfo) -> bool:
    """Tell whether a replica's engine shall be a member: one that is to go stays while it has work."""
    if replica.state is ReplicaState.LEAVING:
        it = world.ranks.get(rank)
        return it is not None and it.has_work and it.engine_id in world.coordinator.group.committed.members
    return replica.state is ReplicaState.ALIVE
