"""Mutations of the coordinator: each rule of its decisions switched off by itself."""

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase
from lb.coordinator.lockstep_group import LockstepGroup, Waves
from tests.model.events import Rules
from tests.model.parts import Rank
from tests.model.world import World

# --- what it knows --------------------------------------------------------------------------------------------------


class TakesSilenceForDeath(LockstepGroup):
    def _knows_everybody(self) -> bool:
        return True


class IgnoresPredecessors(LockstepGroup):
    def _learn(self) -> None:
        """Know only what it did itself."""


class KeepsOldProposals(LockstepGroup):
    def _learn(self) -> None:
        proposal, direct = self.proposal, self.direct
        super()._learn()
        self.proposal, self.direct = proposal, direct


class TakesTheStoppingForAlive(LockstepGroup):
    def _is_dead(self, engine_id: EngineId) -> bool:
        replica = self._replicas.get(engine_id.rank)
        return replica is None or replica.engine_id != engine_id


# --- the direct way -------------------------------------------------------------------------------------------------


class LetsTheParkedBe(LockstepGroup):
    def _is_broken(self, member: EngineId) -> bool:
        report = self._live_report(member)
        is_here = report is not None and report.epoch == self.committed.epoch
        return not is_here and super()._is_broken(member)


class LetsTheLostBe(LockstepGroup):
    def _is_broken(self, member: EngineId) -> bool:
        report = self._live_report(member)
        is_elsewhere = report is not None and report.epoch != self.committed.epoch
        return not is_elsewhere and super()._is_broken(member)


class LetsWhoWaitsInVainBe(LockstepGroup):
    def _has_lost_somebody(self, epoch: int) -> bool:
        return False


class InsistsOnADirectProposal(LockstepGroup):
    def _heal(self) -> bool:
        return False if self.direct and self.proposal is not None else super()._heal()


class InsistsThoughItFailed(LockstepGroup):
    def _has_failed(self, member: EngineId) -> bool:
        return not self.direct and super()._has_failed(member)


class LetsHealingWait(LockstepGroup):
    def _heal(self) -> bool:
        return False if not self.direct and self.proposal is not None else super()._heal()


class CallsTooFew(LockstepGroup):
    def _heal(self) -> bool:
        least, self._min_size = self._min_size, 1
        healed = super()._heal()
        self._min_size = least
        return healed


class InsistsOnTooFew(LockstepGroup):
    def _heal(self) -> bool:
        proposal, direct = self.proposal, self.direct
        healed = super()._heal()
        if not healed and direct:
            self.proposal, self.direct = proposal, direct
        return healed


class TrustsTheBrokenToHold(LockstepGroup):
    def _propose(self, members: list[EngineId], *, direct: bool) -> None:
        super()._propose(members, direct=direct)
        assert self.proposal is not None
        self.proposal = replace(self.proposal, held=[self._held(member) for member in members])


# --- the planned way ------------------------------------------------------------------------------------------------


class IgnoresFailures(LockstepGroup):
    def _has_failed(self, member: EngineId) -> bool:
        return self.direct and super()._has_failed(member)


class InsistsOnAPlannedProposal(LockstepGroup):
    def _commit(self) -> bool:
        proposal = self.proposal
        if proposal is not None and not self.direct and None in map(self._live_report, proposal.members):
            return True
        return super()._commit()


class TakesWhoIsToGo(LockstepGroup):
    def _stays_away(self, member: EngineId) -> bool:
        return self._has_failed(member)


class CommitsWithTheFirst(LockstepGroup):
    def _commit(self) -> bool:
        proposal = self.proposal
        if proposal is not None and any(
            (report := self._live_report(member)) is not None and report.ready_epoch == proposal.epoch
            for member in proposal.members
        ):
            self.committed, self.proposal, self.direct = proposal, None, False
            return True
        return super()._commit()


class PlansInTheMiddle(LockstepGroup):
    def _is_settled(self) -> bool:
        return True


class PlansForTooFew(LockstepGroup):
    def _plan(self) -> None:
        least, self._min_size = self._min_size, 1
        super()._plan()
        self._min_size = least


class FormsWithTheFirst(LockstepGroup):
    def _wanted(self) -> list[EngineId]:
        epoch = self.committed.epoch
        self.committed = replace(self.committed, epoch=epoch or 1)
        wanted = super()._wanted()
        self.committed = replace(self.committed, epoch=epoch)
        return wanted


class LetsBusyLeaversGo(LockstepGroup):
    def _is_leaving_busy(self, member: EngineId) -> bool:
        return False


class WishesOnce(LockstepGroup):
    _proposed_seq = 0

    def _propose(self, members: list[EngineId], *, direct: bool) -> None:
        super()._propose(members, direct=direct)
        self._proposed_seq = self._rebalance_seq

    @property
    def _must_rebalance(self) -> bool:
        return self._rebalance_seq > self._proposed_seq


# --- what it publishes -----------------------------------------------------------------------------------------------


class RepeatsNoProposals(LockstepGroup):
    @property
    def is_observed(self) -> bool:
        proposal, self.proposal = self.proposal, None
        observed = super().is_observed
        self.proposal = proposal
        return observed


class RepeatsNoCommits(LockstepGroup):
    @property
    def is_observed(self) -> bool:
        is_seen = all(report.wave >= self.waves.started for report in self._members())
        return self.proposal is None and is_seen


class RepeatsNoWaves(LockstepGroup):
    @property
    def is_observed(self) -> bool:
        started, self.waves.started = self.waves.started, 0
        observed = super().is_observed
        self.waves.started = started
        return observed


class RepeatsNoDeaths(LockstepGroup):
    @property
    def is_observed(self) -> bool:
        committed = self.committed
        self.committed = replace(committed, members=[m for m in committed.members if self._live_report(m) is not None])
        observed = super().is_observed
        self.committed = committed
        return observed


# --- waves ----------------------------------------------------------------------------------------------------------


class WakesForWorkAlone(Waves):
    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        super().update([replace(report, epoch=epoch) for report in members], epoch)


class WakesForCommitsAlone(Waves):
    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        super().update([replace(report, has_work=False) for report in members], epoch)


class ForgetsRunningWaves(Waves):
    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        started = self.started
        super().update(members, epoch)
        if self.started == max((r.wave for r in members), default=0):
            self.started = started


class WakesAgainAndAgain(Waves):
    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        super().update(members, epoch)
        if any(r.phase is EnginePhase.IDLE and r.has_work and r.wave < self.started for r in members):
            self.started += 1


class WakesTheRunning(Waves):
    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        super().update(members, epoch)
        if any(r.phase is EnginePhase.RUNNING and r.has_work and r.wave == self.started for r in members):
            self.started += 1


class GrantsEveryWish(Waves):
    def on_first_request(self, wave: int, members: Iterable[EngineReport]) -> bool:
        self.started = wave
        return True


def with_waves(waves: type[Waves]) -> Callable[..., LockstepGroup]:
    """Return what makes a group with other waves."""

    def make(generation: int, min_size: int) -> LockstepGroup:
        group = LockstepGroup(generation, min_size)
        group.waves = waves()
        return group

    return make


def counts_on(generation: int, min_size: int) -> LockstepGroup:
    """Return a coordinator whose numbers begin where it thinks that its predecessor's ended."""
    return LockstepGroup(1, min_size)


# --- whom others count on -------------------------------------------------------------------------------------------


class GoesBeforeTheSwitch(Rules):
    def _may_go(self, world: World, rank: int, it: Rank) -> bool:
        known, group = world.coordinator.replicas.get(rank) == world.replicas[rank], world.coordinator.group
        return known and group.committed.epoch > 0 and it.engine_id not in group.committed.members


class GoesUnknown(Rules):
    def _may_go(self, world: World, rank: int, it: Rank) -> bool:
        replicas = world.coordinator.replicas
        world.coordinator.replicas = world.replicas
        may_go = super()._may_go(world, rank, it)
        world.coordinator.replicas = replicas
        return may_go


GROUPS: dict[str, Callable[..., LockstepGroup]] = {
    "silence is no death": TakesSilenceForDeath,
    "what predecessors committed is in force": IgnoresPredecessors,
    "what is learned voids what was proposed": KeepsOldProposals,
    "each generation has numbers of its own": counts_on,
    "a rank that was confirmed dead is dead": TakesTheStoppingForAlive,
    "a parked member breaks the group": LetsTheParkedBe,
    "a member that is elsewhere breaks the group": LetsTheLostBe,
    "a rank that waits in a group that another let go of breaks the group": LetsWhoWaitsInVainBe,
    "a further death voids a direct proposal": InsistsOnADirectProposal,
    "a failed preparation voids a direct proposal": InsistsThoughItFailed,
    "healing goes before scaling": LetsHealingWait,
    "no direct proposal is made to too few": CallsTooFew,
    "a direct proposal of too few is void": InsistsOnTooFew,
    "where a group broke nobody hands over experts": TrustsTheBrokenToHold,
    "a failed preparation voids its proposal": IgnoresFailures,
    "a planned proposal ends with a death": InsistsOnAPlannedProposal,
    "a planned proposal ends with a new rank that is to leave": TakesWhoIsToGo,
    "all must be ready": CommitsWithTheFirst,
    "one change at a time": PlansInTheMiddle,
    "no planned proposal is made to too few": PlansForTooFew,
    "the first group waits for every replica": FormsWithTheFirst,
    "a leaving rank with sequences stays": LetsBusyLeaversGo,
    "a rebalance request stands until it is in force": WishesOnce,
    "a proposal is repeated": RepeatsNoProposals,
    "a commit is repeated until all step in it": RepeatsNoCommits,
    "a wave is repeated until all have seen it": RepeatsNoWaves,
    "a death is repeated until no rank waits for the dead": RepeatsNoDeaths,
    "a rank that rests in an old group is woken": with_waves(WakesForWorkAlone),
    "a rank that rests with work is woken": with_waves(WakesForCommitsAlone),
    "waves of predecessors count": with_waves(ForgetsRunningWaves),
    "a rank that is behind has not seen the newest wave yet": with_waves(WakesAgainAndAgain),
    "a running rank is not woken": with_waves(WakesTheRunning),
    "a request for a wave counts when all rest": with_waves(GrantsEveryWish),
}

REPLICAS: dict[str, type[Rules]] = {
    "a leaving rank stays until the members step without it": GoesBeforeTheSwitch,
    "a leaving rank stays until the coordinator knows that it leaves": GoesUnknown,
}
