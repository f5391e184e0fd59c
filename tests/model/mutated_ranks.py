"""Mutations of a rank: each rule of its decisions switched off by itself."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from engine.parallel.group_member import DPGroupMember, StepHeader, StepVerdict, leaves_below
from engine.wire.control import Membership, PauseMode
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.newest import NewestState
from engine.wire.states import LockstepState
from tests.model.events import Rules
from tests.model.world import World


class _AnyState(NewestState):
    def accept(self, generation: int, seq: int) -> bool:
        super().accept(generation, seq)
        return True


class _NumbersAlone(NewestState):
    def accept(self, generation: int, seq: int) -> bool:
        return super().accept(0, seq)


class TakesOldStates(DPGroupMember):
    def __init__(self, engine_id: EngineId) -> None:
        super().__init__(engine_id)
        self._newest = _AnyState()


class IgnoresGenerations(DPGroupMember):
    def __init__(self, engine_id: EngineId) -> None:
        super().__init__(engine_id)
        self._newest = _NumbersAlone()


class TakesBackWhatWasCommitted(DPGroupMember):
    def on_state(self, state: GroupState) -> None:
        self.committed = Membership(0, [])
        super().on_state(state)


class RestsWhilePaused(DPGroupMember):
    def on_state(self, state: GroupState) -> None:
        super().on_state(replace(state, wave_started=0) if state.settings.pause is not PauseMode.RUN else state)


class RestsAlone(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        verdict = super().on_exchange(headers)
        mine = next(h for h in headers if h is self._said)
        if not mine.has_work and not verdict.switches:
            self.lockstep_state = LockstepState.IDLE
            self._wake()
        return verdict

    def header(self, num_tokens: int, **options: Any) -> StepHeader:
        self._said = super().header(num_tokens, **options)
        return self._said


class RestsThoughAWaveStarted(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        seen, self._wave_seen = self._wave_seen, 0
        verdict = super().on_exchange(headers)
        self._wave_seen = seen
        return verdict


class RestsBehindASwitch(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        verdict = super().on_exchange(headers)
        if verdict.switches and not any(header.has_work for header in headers):
            self.lockstep_state = LockstepState.IDLE
        return StepVerdict(verdict.runs, switches=verdict.switches and self.lockstep_state is LockstepState.RUNNING)


class KeepsItsOwnWave(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        wave = self.wave
        verdict = super().on_exchange(headers)
        self.wave = wave
        return verdict


class KeepsItsOwnStep(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        step = self.step
        verdict = super().on_exchange(headers)
        self.step = step + 1
        return verdict


class SwitchesWithTheFirst(DPGroupMember):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        newest = max(header.committed_epoch for header in headers)
        return super().on_exchange([header._replace(committed_epoch=newest) for header in headers])


class SaysReadyTooEarly(DPGroupMember):
    def header(self, num_tokens: int, **options: Any) -> StepHeader:
        header = super().header(num_tokens, **options)
        return header._replace(committed_epoch=max(self.epoch, self.committed.epoch))


class WaitsToBeReadyToLeave(DPGroupMember):
    def header(self, num_tokens: int, **options: Any) -> StepHeader:
        header = super().header(num_tokens, **options)
        return header if self._engine_id in self.committed.members else header._replace(committed_epoch=self.epoch)


class KeepsWhatItLetGo(DPGroupMember):
    def on_preparing(self, epoch: int) -> None:
        ready = self.ready_epoch
        super().on_preparing(epoch)
        self.ready_epoch = ready


class PreparesOnlyOnce(DPGroupMember):
    @property
    def to_prepare(self) -> Membership | None:
        return None if self.preparing > self.committed.epoch else super().to_prepare


class SleepsThroughDirectProposals(DPGroupMember):
    def on_state(self, state: GroupState) -> None:
        lockstep_state = self.lockstep_state
        super().on_state(state)
        if lockstep_state is LockstepState.IDLE and self.lockstep_state is LockstepState.PARKED:
            self.lockstep_state, self.broken_epoch = LockstepState.IDLE, 0
            self._wake()


class ParkedWaits(DPGroupMember):
    @property
    def may_install(self) -> bool:
        return super().may_install and self.lockstep_state is not LockstepState.PARKED


class JoinerWaits(DPGroupMember):
    @property
    def may_install(self) -> bool:
        return super().may_install and self.lockstep_state is not LockstepState.OUTSIDE


class InstallsOutOfTurn(DPGroupMember):
    @property
    def may_install(self) -> bool:
        lockstep_state, self.lockstep_state = self.lockstep_state, LockstepState.PARKED
        may_install = super().may_install
        self.lockstep_state = lockstep_state
        return may_install


class StartsInAnOldWave(DPGroupMember):
    def on_switched(self) -> None:
        wave = self.wave
        super().on_switched()
        self.wave = wave


class StartsIdle(DPGroupMember):
    def on_switched(self) -> None:
        super().on_switched()
        if self.lockstep_state is LockstepState.RUNNING:
            self.lockstep_state = LockstepState.IDLE
            self._wake()


class GoesOnInABrokenGroup(DPGroupMember):
    def on_broken(self) -> None:
        if self.lockstep_state is LockstepState.RUNNING:
            self.lockstep_state = LockstepState.IDLE


class HidesWhatBroke(DPGroupMember):
    def on_broken(self) -> None:
        super().on_broken()
        self.broken_epoch = 0


class RunsAgain(Rules):
    """A rank that gets work runs on in the wave that ended, and starts none."""

    def _on_request(self, world: World, rank: int, way: int) -> None:
        super()._on_request(world, rank, way)
        it = world.own_rank(rank)
        if it.member.lockstep_state is LockstepState.IDLE:
            it.member.lockstep_state = LockstepState.RUNNING
            self._loop(world, it)


class IsNotCalledOutOfACollective(Rules):
    """A rank in a collective does not see that its group is over."""

    def _on_get(self, world: World, rank: int, number: int) -> None:
        below = world.ranks[rank].leaves_below
        super()._on_get(world, rank, number)
        world.ranks[rank].leaves_below = below


class StaysInOldGroups(Rules):
    """Only a direct proposal ends a group."""

    def _on_get(self, world: World, rank: int, number: int) -> None:
        below, state = world.ranks[rank].leaves_below, world.states[number]
        super()._on_get(world, rank, number)
        world.ranks[rank].leaves_below = max(below, leaves_below(state) if state.direct else 0)


class StaysWithTheDead(Rules):
    """No rank learns that another is dead."""

    def publish(self, world: World) -> None:
        super().publish(world)
        newest = world.num_states - 1
        world.states[newest] = replace(world.states[newest], replicas=[])


MEMBERS: dict[str, type[DPGroupMember]] = {
    "the newest state wins": TakesOldStates,
    "a higher generation is newer": IgnoresGenerations,
    "what was committed is not taken back": TakesBackWhatWasCommitted,
    "a pause makes no rank ignore a started wave": RestsWhilePaused,
    "only consensus ends a wave": RestsAlone,
    "an idle rank that has seen a newer wave goes straight on": RestsThoughAWaveStarted,
    "no rank rests where the group switches": RestsBehindASwitch,
    "the highest wave of an exchange is everybody's": KeepsItsOwnWave,
    "the highest step of an exchange is everybody's": KeepsItsOwnStep,
    "the switch waits for the last to have seen the commit": SwitchesWithTheFirst,
    "a member has seen a commit only when it is ready": SaysReadyTooEarly,
    "a leaving rank has seen a commit without being ready": WaitsToBeReadyToLeave,
    "a new attempt makes the rank unready for the one before": KeepsWhatItLetGo,
    "a newer proposal is prepared though another was begun": PreparesOnlyOnce,
    "an idle rank parks too": SleepsThroughDirectProposals,
    "a parked rank installs on sight": ParkedWaits,
    "a joining rank installs on sight": JoinerWaits,
    "a rank that steps in a group switches only at a step boundary": InstallsOutOfTurn,
    "a group starts in the newest wave seen": StartsInAnOldWave,
    "a group starts running": StartsIdle,
    "a broken exchange parks": GoesOnInABrokenGroup,
    "a rank reports which group it let go of": HidesWhatBroke,
}

RANKS: dict[str, type[Rules]] = {
    "a rank does not run again in a wave that ended": RunsAgain,
    "a rank leaves a collective of a group that is over": IsNotCalledOutOfACollective,
    "a planned proposal ends the groups before the committed one": StaysInOldGroups,
    "a rank leaves a group with a dead member": StaysWithTheDead,
}
