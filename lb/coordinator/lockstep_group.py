"""Membership and waves of a lockstep group: reports and replicas in, memberships and wave numbers out. Pure.

An epoch number names one attempt and is never used again: each generation of the coordinator counts in a range of its
own, because a successor may not have heard of the last attempts. Two ways lead from one membership to the next:

planned: everybody lives. Old and new members prepare while they serve; when all are ready the new membership is
    committed, and the members switch together at the end of a step.
direct: a member died, or a member's group broke. The live members leave whatever they are in, prepare, and start anew
    when it is committed, with one copy of each expert. Replacements join and redundant copies are placed afterwards,
    by the planned way.

The other half of this state machine is ``DPGroupMember`` in ``engine/parallel``; ``tests/model`` searches both.
"""

from collections.abc import Iterable, Mapping, Sequence

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.expert_placement import max_redundant, place_experts

_LOADED = (EnginePhase.IDLE, EnginePhase.RUNNING, EnginePhase.PARKED)

_EPOCHS_PER_GENERATION = 1_000_000
"""More than a coordinator proposes in its life, and the first one counts from 1."""


class Waves:
    """Numbers the running periods of a group. Between waves nobody steps, and an idle group costs no CPU.

    started: the newest wave anybody may run in. It only rises, and to raise it is the only way to wake a rank.
    """

    def __init__(self) -> None:
        self.started = 0

    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        """Look at the members' reports, and start a wave when one is wanted.

        A member that is idle in the newest wave wants the next one when it has work, or is not in the committed epoch:
        a membership takes effect at a step, and the last wave may have ended with somebody who had not seen it. One
        that is behind has not seen the newest wave yet, and will run in it. A wave a member is in already, started by
        a coordinator before this one, is everybody's.

        epoch: the committed one.
        """
        self.started = max([self.started, *(report.wave for report in members)])
        idle = [r for r in members if r.phase is EnginePhase.IDLE and r.wave == self.started]
        if any(report.has_work or report.epoch != epoch for report in idle):
            self.started += 1

    def on_first_request(self, wave: int, members: Iterable[EngineReport]) -> bool:
        """Start the wave a client asks for; True when it is the next one and all members are idle in the newest.

        An optimisation: the member that got the request reports the same a little later. A request that comes late,
        twice or out of the blue names a wave that was started already, or not the next one.
        """
        idle = all(report.phase is EnginePhase.IDLE and report.wave == self.started for report in members)
        if not idle or wave != self.started + 1:
            return False
        self.started = wave
        return True


class LockstepGroup:
    """Decides memberships and waves. ``update`` is to be called whenever a report or the replicas changed.

    Nothing is proposed or put in force before the replicas are known and every member has been heard: who is silent may
    live, and may be further than the others.

    committed: the membership in force. proposal: the one that is being prepared, if any. direct: the way it takes.
    """

    def __init__(self, generation: int = 1, min_size: int = 1, num_redundant_experts: int = 0) -> None:
        """Begin with no members.

        generation: which coordinator this is, from 1. min_size: below so many members nothing is committed.
        num_redundant_experts: copies in the group beside the first of each expert.
        """
        self.committed = Membership(0, [])
        self.proposal: Membership | None = None
        self.direct = False
        self.waves = Waves()
        self._min_size = max(1, min_size)
        self._num_redundant = num_redundant_experts
        self._max_epoch = (generation - 1) * _EPOCHS_PER_GENERATION
        self._reports: Mapping[int, EngineReport] = {}
        self._replicas: Mapping[int, ReplicaInfo] = {}
        self._rebalance_seq = 0

    @property
    def is_observed(self) -> bool:
        """Tell whether everybody has seen what is published of the group.

        Nothing is proposed; every live member has seen the newest wave, and steps in the committed group or has left it
        because of a dead one.
        """
        members = self._members()
        is_whole = len(members) == len(self.committed.members)
        return (
            self.proposal is None
            and self._is_settled()
            and all(report.wave >= self.waves.started for report in members)
            and (is_whole or all(report.phase is EnginePhase.PARKED for report in members))
        )

    def update(self, reports: Mapping[int, EngineReport], replicas: Mapping[int, ReplicaInfo]) -> bool:
        """Look at everybody's newest report and at the replicas; True when something is to be published.

        reports: by rank. replicas: by rank, as the supervisor reported them; empty before it was heard.
        """
        self._reports, self._replicas = reports, replicas
        before = (self.committed, self.proposal, self.direct, self.waves.started)
        self._learn()
        # One thing at a time, the most urgent first: the next report shows what came of it.
        if self._knows_everybody() and not self._heal() and not self._commit():
            self._plan()
        self.waves.update(self._members(), self.committed.epoch)
        return before != (self.committed, self.proposal, self.direct, self.waves.started)

    def on_first_request(self, wave: int) -> bool:
        """Start the wave that a client asks for, see ``Waves``; True when something is to be published."""
        members = self._members()
        return bool(members) and self.waves.on_first_request(wave, members)

    def rebalance(self, seq: int) -> None:
        """Place experts anew, by how often each was chosen, unless that was done since it was requested.

        seq: of the newest request. The membership in force names the one it follows, so a request is neither lost with
        an attempt that comes to nothing nor fulfilled again by a successor.
        """
        self._rebalance_seq = seq

    # --- what others know already -----------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Go on from what the members have seen: a coordinator that starts knows nothing else.

        What was put in force by a predecessor is in force, and makes void what was proposed without knowing of it.
        """
        for report in self._reports.values():
            if report.member is not None and report.member.membership.epoch > self.committed.epoch:
                self.committed, self.proposal, self.direct = report.member.membership, None, False

    # --- the direct way ---------------------------------------------------------------------------------------------

    def _heal(self) -> bool:
        """Propose the live members of the committed group when it is broken; True while there is nothing else to do."""
        if self.direct and self.proposal is not None:
            is_void = any(self._live_report(m) is None or self._has_failed(m) for m in self.proposal.members)
        else:
            is_void = any(map(self._is_broken, self.committed.members))
        if not is_void:
            return False
        live = [member for member in self.committed.members if self._live_report(member) is not None]
        if len(live) < self._min_size:
            # Too few to go on by themselves. They wait parked until others have loaded, and go on with these.
            if self.direct:
                self.proposal, self.direct = None, False
            return False
        self._propose(live, direct=True)
        return True

    def _is_broken(self, member: EngineId) -> bool:
        """Tell whether a member is dead, or neither steps in the committed group nor is about to."""
        report = self._live_report(member)
        if report is None:
            return True
        if report.epoch == self.committed.epoch:
            return report.phase is EnginePhase.PARKED
        waits_in_vain = report.phase is not EnginePhase.PARKED and self._has_lost_somebody(report.epoch)
        return report.ready_epoch != self.committed.epoch or waits_in_vain

    def _has_lost_somebody(self, epoch: int) -> bool:
        """Tell whether some rank, perhaps one that leaves, let go of a group that is over.

        A member that did not notice waits there for a step that never ends, so it would never switch.
        """
        statuses = [report.member for report in self._reports.values()]
        return any(status is not None and 0 < status.broken_epoch == epoch for status in statuses)

    # --- both ways --------------------------------------------------------------------------------------------------

    def _commit(self) -> bool:
        """Put the proposal in force when everybody it concerns is ready; True while one is being prepared."""
        proposal = self.proposal
        if proposal is None:
            return False
        reports = [self._live_report(member) for member in proposal.members]
        if not self.direct and (None in reports or any(map(self._stays_away, proposal.members))):
            self.proposal = None
            return False
        if all(report is not None and report.ready_epoch == proposal.epoch for report in reports):
            self.committed, self.proposal, self.direct = proposal, None, False
        return True

    def _propose(self, members: list[EngineId], *, direct: bool) -> None:
        self._max_epoch += 1  # also behind an attempt that failed: members may still be in it
        first = self._reports[members[0].rank].member
        assert first is not None, "only members of a lockstep group are proposed"
        held = [self._held(member) for member in members]
        by_load = self._must_rebalance and not direct  # experts that move take time to load, as redundant ones do
        placement = place_experts(
            first.num_experts,
            held,
            0 if direct else self._num_redundant,  # copies take time to load, and nobody serves until all are ready
            self._expert_loads() if by_load else None,
        )
        # Where a group broke, a member may hold what the epoch before placed on it: then nobody asks its peers.
        given = [] if direct else [[] if self._is_asleep(m) else mine for m, mine in zip(members, held, strict=True)]
        self.proposal = Membership(
            self._max_epoch,
            members,
            placement,
            first.store_address,
            given,
            self._rebalance_seq if by_load else self.committed.rebalance_seq,
        )
        self.direct = direct

    # --- the planned way --------------------------------------------------------------------------------------------

    @property
    def _must_rebalance(self) -> bool:
        return self._rebalance_seq > self.committed.rebalance_seq

    def _plan(self) -> None:
        """Propose what the replicas want when it is not in force, once the last change has settled."""
        wanted = self._wanted()
        if len(wanted) < self._min_size or not self._is_settled():
            return
        if wanted != self.committed.members or (wanted and (self._must_rebalance or self._lacks_copies())):
            self._propose(wanted, direct=False)

    def _lacks_copies(self) -> bool:
        """Tell whether redundant experts are missing: the committed group came about by the direct way."""
        placement = self.committed.expert_placement
        num_experts = len(set().union(*placement))
        return sum(map(len, placement)) < num_experts + max_redundant(num_experts, len(placement), self._num_redundant)

    def _wanted(self) -> list[EngineId]:
        """Return the engines that shall be members: loaded, and in a replica that is to stay.

        A member that is to go stays while it has sequences: only members step. The first group waits for every replica,
        so that it need not be re-formed for each engine that comes.
        """
        replicas = [
            replica
            for replica in self._replicas.values()
            if replica.state in (ReplicaState.STARTING, ReplicaState.ALIVE)
        ]
        loaded = [
            replica.engine_id
            for replica in replicas
            if (report := self._live_report(replica.engine_id)) is not None and report.phase in _LOADED
        ]
        if self.committed.epoch == 0 and len(loaded) < len(replicas):
            return []
        return sorted([*loaded, *filter(self._is_leaving_busy, self.committed.members)])

    def _is_leaving_busy(self, member: EngineId) -> bool:
        report = self._live_report(member)
        return report is not None and report.load.num_sequences > 0 and self._is_leaving(member)

    def _is_leaving(self, member: EngineId) -> bool:
        replica = self._replicas.get(member.rank)
        return replica is not None and replica.engine_id == member and replica.state is ReplicaState.LEAVING

    def _expert_loads(self) -> list[float]:
        """Return how often each expert was chosen, by the tokens of all engines that are heard."""
        statuses = [report.member for report in self._reports.values() if report.member is not None]
        return [float(sum(counts)) for counts in zip(*(status.expert_loads for status in statuses), strict=False)]

    def _is_settled(self) -> bool:
        """Tell whether every live member steps in the committed group."""
        return all(report.epoch == self.committed.epoch for report in self._members())

    # --- who lives --------------------------------------------------------------------------------------------------

    def _everybody(self) -> set[EngineId]:
        return {*self.committed.members, *(self.proposal.members if self.proposal is not None else ())}

    def _members(self) -> list[EngineReport]:
        return [report for member in self.committed.members if (report := self._live_report(member)) is not None]

    def _knows_everybody(self) -> bool:
        """Tell whether every member was heard or is dead. Before the replicas are known nobody lives."""
        return all(self._is_dead(member) or self._live_report(member) is not None for member in self._everybody())

    def _is_dead(self, engine_id: EngineId) -> bool:
        """Tell whether an engine is confirmed dead, was replaced, has no replica any more, or reports that it ends."""
        replica = self._replicas.get(engine_id.rank)
        if replica is None or replica.engine_id != engine_id or replica.state is ReplicaState.DEAD:
            return True
        report = self._reports.get(engine_id.rank)
        return report is not None and report.engine_id == engine_id and report.phase is EnginePhase.STOPPING

    def _live_report(self, engine_id: EngineId) -> EngineReport | None:
        """Return a live engine's newest report; None when it is dead, or was not heard as a loaded lockstep rank."""
        report = self._reports.get(engine_id.rank)
        if report is None or report.engine_id != engine_id or report.member is None or self._is_dead(engine_id):
            return None
        return report

    def _has_failed(self, member: EngineId) -> bool:
        """Tell whether a member could not prepare the proposal."""
        assert self.proposal is not None, "only a proposal can fail"
        report = self._live_report(member)
        status = report.member if report is not None else None
        return status is not None and status.failed_epoch == self.proposal.epoch

    def _is_asleep(self, member: EngineId) -> bool:
        """Tell whether a member has its experts in no memory, and so has none to give."""
        report = self._live_report(member)
        return report is not None and report.is_sleeping

    def _stays_away(self, member: EngineId) -> bool:
        """Tell whether a member could not prepare the proposal, or is asked to go before it has joined."""
        return self._has_failed(member) or (member not in self.committed.members and self._is_leaving(member))

    def _held(self, member: EngineId) -> list[int]:
        if member not in self.committed.members:
            return []
        return list(self.committed.expert_placement[self.committed.members.index(member)])
