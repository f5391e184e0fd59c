"""What one rank decides, each rule of it switched off by itself."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from engine.parallel.header import StepHeader
from engine.parallel.member import Member, Stance, StepVerdict, leaves_below
from engine.wire.messages import GroupState, Membership
from tests.model.events import Rules
from tests.model.world import World


class TakesOldStates(Member):
    def on_state(self, state: GroupState) -> None:
        self._newest = (-1, -1)
        super().on_state(state)


class IgnoresGenerations(Member):
    def on_state(self, state: GroupState) -> None:
        self._newest = (state.generation, self._newest[1])
        super().on_state(state)


class TakesBackWhatWasCommitted(Member):
    def on_state(self, state: GroupState) -> None:
        self.committed = Membership(0, [])
        super().on_state(state)


class RestsWhilePaused(Member):
    def on_state(self, state: GroupState) -> None:
        super().on_state(replace(state, wave_started=0) if state.pause % 2 else state)


class RestsAlone(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        verdict = super().on_exchange(headers)
        mine = next(h for h in headers if h is self._said)
        if not mine.has_work and not verdict.switches:
            self.stance = Stance.IDLE
            self._wake()
        return verdict

    def header(self, num_tokens: int, **knobs: Any) -> StepHeader:
        self._said = super().header(num_tokens, **knobs)
        return self._said


class RestsThoughAWaveStarted(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        seen, self._wave_seen = self._wave_seen, 0
        verdict = super().on_exchange(headers)
        self._wave_seen = seen
        return verdict


class RestsBehindASwitch(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        verdict = super().on_exchange(headers)
        if verdict.switches and not any(header.has_work for header in headers):
            self.stance = Stance.IDLE
        return StepVerdict(verdict.runs, switches=verdict.switches and self.stance is Stance.RUNNING)


class KeepsItsOwnWave(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        wave = self.wave
        verdict = super().on_exchange(headers)
        self.wave = wave
        return verdict


class KeepsItsOwnStep(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        step = self.step
        verdict = super().on_exchange(headers)
        self.step = step + 1
        return verdict


class SwitchesWithTheFirst(Member):
    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        newest = max(header.committed_epoch for header in headers)
        return super().on_exchange([header._replace(committed_epoch=newest) for header in headers])


class SaysReadyTooEarly(Member):
    def header(self, num_tokens: int, **knobs: Any) -> StepHeader:
        header = super().header(num_tokens, **knobs)
        return header._replace(committed_epoch=max(self.epoch, self.committed.epoch))


class WaitsToBeReadyToLeave(Member):
    def header(self, num_tokens: int, **knobs: Any) -> StepHeader:
        header = super().header(num_tokens, **knobs)
        return header if self._engine_id in self.committed.members else header._replace(committed_epoch=self.epoch)


class KeepsWhatItLetGo(Member):
    def on_preparing(self, epoch: int) -> None:
        ready = self.ready_epoch
        super().on_preparing(epoch)
        self.ready_epoch = ready


class PreparesOnlyOnce(Member):
    @property
    def to_prepare(self) -> Membership | None:
        return None if self.preparing > self.committed.epoch else super().to_prepare


class SleepsThroughDirectProposals(Member):
    def on_state(self, state: GroupState) -> None:
        stance = self.stance
        super().on_state(state)
        if stance is Stance.IDLE and self.stance is Stance.PARKED:
            self.stance, self.broken_epoch = Stance.IDLE, 0
            self._wake()


class ParkedWaits(Member):
    @property
    def may_install(self) -> bool:
        return super().may_install and self.stance is not Stance.PARKED


class JoinerWaits(Member):
    @property
    def may_install(self) -> bool:
        return super().may_install and self.stance is not Stance.OUTSIDE


class InstallsOutOfTurn(Member):
    @property
    def may_install(self) -> bool:
        stance, self.stance = self.stance, Stance.PARKED
        may_install = super().may_install
        self.stance = stance
        return may_install


class StartsInAnOldWave(Member):
    def on_switched(self) -> None:
        wave = self.wave
        super().on_switched()
        self.wave = wave


class StartsIdle(Member):
    def on_switched(self) -> None:
        super().on_switched()
        if self.stance is Stance.RUNNING:
            self.stance = Stance.IDLE
            self._wake()


class GoesOnInABrokenGroup(Member):
    def on_broken(self) -> None:
        if self.stance is Stance.RUNNING:
            self.stance = Stance.IDLE


class HidesWhatBroke(Member):
    def on_broken(self) -> None:
        super().on_broken()
        self.broken_epoch = 0


class RunsAgain(Rules):
    """A rank that gets work runs on in the wave that ended, and starts none."""

    def _on_request(self, world: World, rank: int, way: int) -> None:
        super()._on_request(world, rank, way)
        it = world.own_rank(rank)
        if it.member.stance is Stance.IDLE:
            it.member.stance = Stance.RUNNING
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
        world.states[newest] = replace(world.states[newest], seats=[])


MEMBERS: dict[str, type[Member]] = {
    "the newest state wins": TakesOldStates,
    "a higher generation is newer": IgnoresGenerations,
    "what was committed is not taken back": TakesBackWhatWasCommitted,
    "a pause makes no rank ignore a started wave": RestsWhilePaused,
    "only consensus ends a wave": RestsAlone,
    "who rests having seen a newer wave goes straight on": RestsThoughAWaveStarted,
    "nobody rests where the group switches": RestsBehindASwitch,
    "the highest wave of an exchange is everybody's": KeepsItsOwnWave,
    "the highest step of an exchange is everybody's": KeepsItsOwnStep,
    "the switch waits for the last to have seen the commit": SwitchesWithTheFirst,
    "a member has seen a commit only when it is ready": SaysReadyTooEarly,
    "a leaver has seen a commit without being ready": WaitsToBeReadyToLeave,
    "a new attempt makes the rank unready for the one before": KeepsWhatItLetGo,
    "a newer proposal is prepared though another was begun": PreparesOnlyOnce,
    "who rests parks too": SleepsThroughDirectProposals,
    "a parked rank installs on sight": ParkedWaits,
    "a joiner installs on sight": JoinerWaits,
    "who steps in a group switches only at a step": InstallsOutOfTurn,
    "a group starts in the newest wave seen": StartsInAnOldWave,
    "a group starts running": StartsIdle,
    "a broken exchange parks": GoesOnInABrokenGroup,
    "a rank says which group it let go of": HidesWhatBroke,
}

RANKS: dict[str, type[Rules]] = {
    "a rank does not run again in a wave that ended": RunsAgain,
    "a rank leaves a collective of a group that is over": IsNotCalledOutOfACollective,
    "a planned proposal ends the groups before the committed one": StaysInOldGroups,
    "a rank leaves a group with a dead member": StaysWithTheDead,
}
