"""The effects of events on a world, cut so that nothing else can come in between.

A rank's loop runs on after every event of the rank until it waits in a collective or has nothing to do: what could come
in between could as well have come a moment earlier or later.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from engine.parallel.group_member import DPGroupMember, leaves_below
from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo, replicas_by_rank
from engine.wire.states import LockstepState, ReplicaState
from lb.coordinator.lockstep_group import LockstepGroup
from tests.model.enabled import EnabledEvents, Event
from tests.model.parts import Collective, Coordinator, Group, Rank, settings_after
from tests.model.safety import check_headers, check_size, parked
from tests.model.world import Budget, ViolationError, World

_USUAL_AGE = 1000  # states a coordinator has published when it ends: its successor counts from 0
_NUM_REPEATED = 6


class Rules(EnabledEvents):
    """The machines of a world, and the effects of events on it; mutations replace some.

    mail_depth: reports of a rank that can be on the way at a time. is_calm: nothing happens that could make a rank
    park, so none may.
    """

    def __init__(
        self,
        member: Callable[[EngineId], DPGroupMember] = DPGroupMember,
        group: Callable[[int, int], LockstepGroup] = LockstepGroup,
        *,
        min_size: int = 1,
        mail_depth: int = 1,
        repeats: bool = False,
        is_calm: bool = False,
    ) -> None:
        super().__init__(repeats=repeats)
        self.member = member
        self.group = group
        self.min_size = min_size
        self.mail_depth = mail_depth
        self.is_calm = is_calm

    # --- worlds to begin with ---------------------------------------------------------------------------------------

    def new_world(self, num_ranks: int, budget: Budget, *, is_loaded: bool = True) -> World:
        """Return a world whose ranks are in no group yet."""
        world = World(Coordinator(1, self.group(1, self.min_size), num_states=_USUAL_AGE), budget)
        for rank in range(num_ranks):
            self._replica(world, EngineId(rank, 1), is_loaded=is_loaded)
        self.publish(world)
        return world

    def _replica(self, world: World, engine_id: EngineId, *, is_loaded: bool) -> None:
        world.num_replicas = max(world.num_replicas, engine_id.rank + 1)
        world.replicas = {**world.replicas, engine_id.rank: ReplicaInfo(engine_id, ReplicaState.ALIVE)}
        world.ranks[engine_id.rank] = Rank(
            engine_id, self.member(engine_id), is_loaded=is_loaded, seen=world.num_states - 2
        )

    # --- it happens -------------------------------------------------------------------------------------------------

    def after(self, world: World, event: Event) -> World:
        """Return the world after an event.

        Raises:
            ViolationError: a rule of safety is broken by it.
        """
        following = world.copy()
        self.happen(following, event)
        return following

    def happen(self, world: World, event: Event) -> None:
        """Let an event change a world that may be changed."""
        name, rank, way = event
        handler: Callable[[World, int, int], None] = getattr(self, f"_on_{name}")
        before = parked(world) if self.is_calm else set()
        try:
            handler(world, rank, way)
        except AssertionError as error:
            raise ViolationError(f"{event}: {error}") from error
        members = world.coordinator.group.committed.members
        if self.is_calm and any(engine_id in members for engine_id in parked(world) - before):
            raise ViolationError(f"{event}: a member parks, and nothing went wrong")
        world.tidy(_NUM_REPEATED if self.repeats else 0)

    # the network

    def _on_send(self, world: World, rank: int, _way: int) -> None:
        mail = world.mail.get(rank, ())
        world.mail[rank] = (*mail[: self.mail_depth - 1], world.ranks[rank].report())

    def _on_recv(self, world: World, rank: int, way: int) -> None:
        mail = world.mail.pop(rank)
        if way + 1 < len(mail):
            world.mail[rank] = mail[way + 1 :]
        report = mail[way]
        coordinator = world.own_coordinator()
        known = coordinator.reports.get(rank)
        if known is not None and known.engine_id > report.engine_id:
            return
        if _is_listed(coordinator.replicas, report.engine_id):
            coordinator.reports[rank] = report
            self._update(world, coordinator)

    def _on_replicas(self, world: World, _rank: int, _way: int) -> None:
        coordinator = world.own_coordinator()
        coordinator.replicas = world.replicas
        gone = [rank for rank, r in coordinator.reports.items() if not _is_listed(world.replicas, r.engine_id)]
        for rank in gone:
            del coordinator.reports[rank]
        coordinator.settings, coordinator.rebalances = world.settings, world.rebalances
        coordinator.group.rebalance(world.rebalances)
        self._update(world, coordinator, changed=True)

    def _on_get(self, world: World, rank: int, number: int) -> None:
        it = world.own_rank(rank)
        state = world.states[number]
        is_newer = number > it.seen
        if is_newer or it.place is None:  # its input thread, too, lets nothing older through
            it.slot = number
        if is_newer:
            it.replicas = replicas_by_rank(state.replicas)
        it.seen = max(it.seen, number)
        it.leaves_below = max(it.leaves_below, leaves_below(state))
        self._loop(world, it)

    def _update(self, world: World, coordinator: Coordinator, *, changed: bool = False) -> None:
        if coordinator.group.update(coordinator.reports, coordinator.replicas) or changed:
            self.publish(world)

    def publish(self, world: World) -> None:
        """Let the coordinator publish its state."""
        coordinator = world.own_coordinator()
        group = coordinator.group
        check_size(group.committed, self.min_size)
        for membership in (group.committed, group.proposal):
            if membership is not None:
                world.name_epoch(membership)
        world.committed |= {group.committed.epoch}
        world.states[world.num_states] = GroupState(
            coordinator.generation,
            coordinator.num_states,
            group.committed,
            group.proposal,
            group.direct,
            [],
            group.waves.started,
            [],
            list(coordinator.replicas.values()),
            settings_after(coordinator.settings),
        )
        coordinator.num_states += 1
        world.num_states += 1

    # preparing

    def _on_meet(self, world: World, rank: int, _way: int) -> None:
        """Let a preparation end well, unless the rank is to hand over experts that it does not hold."""
        it = world.own_rank(rank)
        it.is_waited_for, it.result = False, holds(world, it)
        if not it.result:
            self._let_go(world, it, it.preparing)
        self._loop(world, it)

    def _on_fail(self, world: World, rank: int, way: int) -> None:
        if way:
            world.spend("failures")
        it = world.own_rank(rank)
        it.is_waited_for, it.result = False, False
        self._let_go(world, it, it.preparing)
        self._loop(world, it)

    # collectives

    def _on_take(self, world: World, rank: int, way: int) -> None:
        it = world.own_rank(rank)
        place = it.place
        assert place is not None
        it.place = None
        if place.is_rows:
            it.has_work = it.has_work and not way
            self._after_step(world, it)
        else:
            group = world.own_group(place.epoch)
            headers = dict(group.posts)[place.position]
            check_headers(place, headers)
            verdict = it.member.on_exchange(list(headers))
            if group.verdict[0] == place.position:
                assert group.verdict[1] == verdict, f"{group.verdict[1]} and {verdict} of one exchange"
            group.verdict = (place.position, verdict)
            it.switches = verdict.switches
            if verdict.runs:
                self._enter(world, it, (), is_rows=True)
            else:
                self._after_step(world, it)

    def _after_step(self, world: World, it: Rank) -> None:
        if it.switches:
            it.switches = False
            self._switch(it)
        self._loop(world, it)

    def _on_break(self, world: World, rank: int, way: int) -> None:
        """Let an exchange end without result; way 1: for this rank alone, and no member notices that it lets go."""
        it = world.own_rank(rank)
        if way:
            assert it.place is not None
            world.spend("cuts")
            world.own_group(it.place.epoch).cut |= {it.engine_id}
        it.place, it.switches = None, False
        it.member.on_broken()
        self._loop(world, it)

    _on_leave = _on_break

    def _enter(self, world: World, it: Rank, post: Any, *, is_rows: bool) -> None:
        epoch = it.member.epoch
        assert epoch in world.committed, f"rank {it.engine_id} steps in epoch {epoch}, which was never put in force"
        group = world.own_group(epoch)
        assert group.is_met, f"rank {it.engine_id} steps in epoch {epoch}, which is not connected"
        members = group.membership.members
        mine = members.index(it.engine_id)
        position = group.entered[mine]
        assert position <= min(group.entered), f"rank {it.engine_id} is ahead by more than a collective"
        group.entered = tuple(count + (index == mine) for index, count in enumerate(group.entered))
        posts = dict(group.posts)
        row = posts.get(position, (None,) * len(members))
        others = [other for other in row if other is not None]
        assert all((other == ()) == is_rows for other in others), f"position {position} is two kinds of collective"
        posts[position] = tuple(post if index == mine else other for index, other in enumerate(row))
        oldest = min(group.entered) - 1
        group.posts = tuple(sorted((at, row) for at, row in posts.items() if at >= oldest))
        it.place = Collective(epoch, position, is_rows)

    # a rank's loop

    def _loop(self, world: World, it: Rank) -> None:
        """Let the loop run until it waits: the order is that of the rank's process."""
        if it.place is not None or not it.is_loaded:
            return
        member = it.member
        if it.slot >= 0:
            state = world.states[it.slot]
            it.slot = -1
            it.settings = max(it.settings, state.settings.seq)
            member.on_state(state)
        self._take_result(it)
        if member.lockstep_state is LockstepState.PARKED:
            self._let_go(world, it, member.epoch)
        wanted = member.to_prepare
        if wanted is not None:
            self._prepare(world, it, wanted)
        if member.may_install:
            self._switch(it)
        if member.lockstep_state is LockstepState.RUNNING:
            works = it.has_work and not it.is_paused
            self._enter(world, it, member.header(int(works), has_work=works, paused=it.is_paused), is_rows=False)

    def _take_result(self, it: Rank) -> None:
        if it.result is None:
            return
        works, it.result = it.result, None
        if works:
            it.standby = it.preparing
            it.member.on_prepared(it.preparing)
        else:
            it.failed_epoch = it.preparing

    def _prepare(self, world: World, it: Rank, wanted: Membership) -> None:
        if it.standby:
            self._let_go(world, it, it.standby)
            it.standby = 0
        epoch = it.preparing = wanted.epoch
        it.member.on_preparing(epoch)
        it.is_waited_for, it.result = True, None
        world.name_epoch(wanted)
        if epoch not in world.groups:
            world.groups[epoch] = Group(wanted, entered=(0,) * len(wanted.members))
        group = world.own_group(epoch)
        assert it.engine_id not in group.begun, f"epoch {epoch} is prepared twice"
        group.begun |= {it.engine_id}

    def _switch(self, it: Rank) -> None:
        it.member.on_switched()
        if it.member.lockstep_state is LockstepState.OUTSIDE:
            return
        assert it.standby == it.member.epoch, f"rank {it.engine_id} has {it.standby}, not {it.member.epoch}"
        it.standby = 0

    def _let_go(self, world: World, it: Rank, epoch: int) -> None:
        group = world.groups.get(epoch)
        if group is not None and it.engine_id not in group.gone | group.cut:
            world.own_group(epoch).gone |= {it.engine_id}

    # the world outside

    def _on_request(self, world: World, rank: int, _way: int) -> None:
        world.spend("requests")
        world.own_rank(rank).has_work = True

    def _on_finish(self, world: World, rank: int, _way: int) -> None:
        world.own_rank(rank).has_work = False

    def _on_pause(self, world: World, _rank: int, _way: int) -> None:
        if world.settings % 2 == 0:
            world.spend("pauses")
        world.settings += 1

    def _on_die(self, world: World, rank: int, way: int) -> None:
        """Let a process end; way 1: out of reach, so that no connection to it breaks."""
        world.spend("deaths")
        if way:
            del world.ranks[rank]
        else:
            self._end(world, rank)

    def _end(self, world: World, rank: int) -> None:
        it = world.ranks.pop(rank)
        for epoch, group in list(world.groups.items()):
            if it.engine_id in group.membership.members:
                world.own_group(epoch).gone |= {it.engine_id}

    def _on_confirm(self, world: World, rank: int, _way: int) -> None:
        world.replicas = {**world.replicas, rank: replace(world.replicas[rank], state=ReplicaState.DEAD)}

    def _on_replacement(self, world: World, rank: int, _way: int) -> None:
        world.spend("replacements")
        self._replica(world, EngineId(rank, world.replicas[rank].engine_id.incarnation + 1), is_loaded=False)

    def _on_firstreq(self, world: World, _rank: int, _way: int) -> None:
        """Let a client request the next wave, whether or not its request arrives at a rank."""
        world.spend("firstreqs")
        group = world.own_coordinator().group
        if group.on_first_request(group.waves.started + 1):
            self.publish(world)

    def _on_rebalance(self, world: World, _rank: int, _way: int) -> None:
        world.spend("rebalances")
        world.rebalances += 1

    def _on_join(self, world: World, _rank: int, _way: int) -> None:
        world.spend("joins")
        self._replica(world, EngineId(world.num_replicas, 1), is_loaded=False)

    def _on_load(self, world: World, rank: int, _way: int) -> None:
        it = world.own_rank(rank)
        it.is_loaded = True
        self._loop(world, it)

    def _on_cordon(self, world: World, rank: int, _way: int) -> None:
        world.spend("leaves")
        world.replicas = {**world.replicas, rank: replace(world.replicas[rank], state=ReplicaState.LEAVING)}

    def _on_restore(self, world: World, rank: int, _way: int) -> None:
        """Let a rank stay after all, whether or not the group has gone on without it."""
        world.spend("returns")
        world.replicas = {**world.replicas, rank: replace(world.replicas[rank], state=ReplicaState.ALIVE)}

    def _on_go(self, world: World, rank: int, _way: int) -> None:
        self._end(world, rank)
        world.replicas = {other: replica for other, replica in world.replicas.items() if other != rank}
        world.mail.pop(rank, None)

    def _on_restart(self, world: World, _rank: int, _way: int) -> None:
        world.spend("restarts")
        generation = world.coordinator.generation + 1
        world.coordinator = Coordinator(generation, self.group(generation, self.min_size))
        self.publish(world)


def holds(world: World, it: Rank) -> bool:
    """Tell whether a rank has what it is to hand over: the experts of the group it steps in, or stepped in last."""
    wanted = world.epochs[it.preparing]
    if not wanted.held:
        return True
    named = wanted.held[wanted.members.index(it.engine_id)]
    own = world.epochs.get(it.member.epoch, wanted)
    has = own.expert_placement[own.members.index(it.engine_id)] if it.member.epoch else []
    return set(named) <= set(has)


def _is_listed(replicas: dict[int, ReplicaInfo], engine_id: EngineId) -> bool:
    """Tell whether ``CoordinatorState`` takes reports of an engine."""
    if not replicas:
        return True
    replica = replicas.get(engine_id.rank)
    if replica is None or engine_id.incarnation < replica.engine_id.incarnation:
        return False
    return engine_id != replica.engine_id or replica.state != ReplicaState.DEAD
