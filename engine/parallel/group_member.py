"""The decisions of one rank of a lockstep group: when it steps, when it rests, and which group it steps in.

Pure: states of the coordinator and results of exchanges in, decisions out. Control is state, not events: a state may be
lost, repeated or late, and the newest one holds everything again. What two ranks must agree on they agree on in the
exchange at the beginning of a step, where all see the same; a rank alone decides nothing but to rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.newest import NewestState
from engine.wire.replicas import ReplicaInfo, any_has_ended, replicas_by_rank
from engine.wire.states import LockstepState


class StepHeader(NamedTuple):
    """What one rank sends the others at the beginning of a step. Whole numbers alone: a row of them is exchanged.

    epoch, wave, step: where it stands; joining ranks adopt the highest. num_tokens: rows it brings into the step.
    has_work: it has sequences that can run, read after its inbox was drained. committed_epoch: the newest committed
    epoch that it has seen and is ready for. paused: it has seen the pause and would rather stop (0 or 1). asleep: its
    experts are in no memory (0 or 1).
    """

    epoch: int
    wave: int
    step: int
    num_tokens: int
    has_work: int
    committed_epoch: int
    paused: int
    asleep: int = 0


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What an exchange of headers decided for its step.

    runs: a member has tokens, so all take part in every layer. Never while a member sleeps: its experts would silently
    be left out, so a rank that woke up before it drops its plan and makes it again.

    switches: it is the last step of this group; the standby group, if this rank is in it, takes over behind it.
    """

    runs: bool
    switches: bool


def leaves_below(state: GroupState) -> int:
    """Return the epoch below which every group is to be left, out of a collective even; 0: none."""
    if state.proposal is None:
        return 0
    # A direct proposal calls all members. A planned one is made when all members step in what is committed: a rank that
    # is in an older group then, a leaving rank that is to stay after all perhaps, waits there for nobody.
    return state.proposal.epoch if state.direct else state.committed.epoch


class DPGroupMember:
    """One rank's part in waves and epochs.

    Only a raised ``wave_started`` moves it from IDLE to RUNNING, only consensus in the exchange moves it back: other
    readings of the same words trap the group within a few events.

    epoch: of the group it steps in; 0 outside. preparing: the newest attempt that was begun. ready_epoch: of the group
    that it prepared last and still has, which may be the one it steps in.
    wave, step: where it stands; joining ranks adopt the highest. committed: the newest committed membership it has
    seen. peers: members of the group it steps in. broken_epoch: of the newest one it parked in: peers may not have
    noticed. max_epoch_seen: no epoch up to here may be used for another attempt.
    generation: of the coordinator that the newest state came from; -1 before the first.
    """

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        self._newest = NewestState()
        self._wave_seen = 0
        self._proposal: Membership | None = None
        self._leaves_below = 0
        self._replicas: Mapping[int, ReplicaInfo] = {}
        self.generation = -1
        self.peers: Sequence[EngineId] = ()
        self.lockstep_state = LockstepState.OUTSIDE
        self.epoch = 0
        self.preparing = 0
        self.ready_epoch = 0
        self.broken_epoch = 0
        self.max_epoch_seen = 0
        self.wave = 0
        self.step = 0
        self.committed = Membership(0, [])

    # --- what comes in ------------------------------------------------------------------------------------------------

    def on_state(self, state: GroupState) -> None:
        """Take in the coordinator's state; older and repeated ones change nothing."""
        if not self._newest.accept(state.generation, state.seq):
            return
        self.generation = state.generation
        self._proposal = state.proposal
        self._leaves_below = leaves_below(state)
        self._replicas = replicas_by_rank(state.replicas)
        self._wave_seen = state.wave_started
        # A successor that has not heard of a commit yet publishes an older one: it does not undo what is in force.
        if state.committed.epoch > self.committed.epoch:
            self.committed = state.committed
        proposed = state.proposal.epoch if state.proposal is not None else 0
        self.max_epoch_seen = max(self.max_epoch_seen, self.committed.epoch, proposed)
        if self.must_leave:
            self.on_broken()
        self._wake()

    def on_preparing(self, epoch: int) -> None:
        """Note that the group of an epoch is being prepared. One that was ready and is not stepped in is let go."""
        self.preparing = epoch
        self.ready_epoch = min(self.ready_epoch, self.epoch)

    def on_prepared(self, epoch: int) -> None:
        """Note that the group of an epoch is ready to take over."""
        self.ready_epoch = epoch

    def on_broken(self) -> None:
        """Park: the group's exchange broke, or it must be left. What was under way is to be discarded."""
        self.lockstep_state = LockstepState.PARKED
        self.broken_epoch = self.epoch

    def on_exchange(self, headers: Sequence[StepHeader]) -> StepVerdict:
        """Take in the headers of all members, this rank's own included, and decide what all decide."""
        assert self.lockstep_state is LockstepState.RUNNING, "only a running rank exchanges"
        self.wave = max(header.wave for header in headers)
        self.step = max(header.step for header in headers) + 1
        # The switch waits for the last member to have seen the commit and be ready, so that nobody is left behind.
        switches = min(header.committed_epoch for header in headers) > self.epoch
        rests = not any(header.has_work for header in headers) or all(header.paused for header in headers)
        if rests and not switches:
            self.lockstep_state = LockstepState.IDLE
            self._wake()  # it may have seen the next wave already, and then goes straight on
        runs = any(header.num_tokens for header in headers) and not any(header.asleep for header in headers)
        return StepVerdict(runs=runs, switches=switches)

    def on_switched(self) -> None:
        """Step in the newest committed group from now on, or in none when this rank is not in it."""
        if self._engine_id in self.committed.members:
            assert self.ready_epoch == self.committed.epoch, "a group is committed when all are ready"
            self.epoch, self.peers = self.committed.epoch, self.committed.members
            self.wave = max(self.wave, self._wave_seen)
            # Never IDLE: peers may have work already, and a rank that rested here would not be in their exchange.
            self.lockstep_state = LockstepState.RUNNING
        else:
            self.epoch, self.peers = 0, ()
            self.lockstep_state = LockstepState.OUTSIDE

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def must_leave(self) -> bool:
        """Tell whether this rank is to leave the group it is in, out of a collective even.

        The group is over, or a member is gone: connections to a host that is out of reach do not break, and of a group
        that is being left the coordinator takes no care any more.
        """
        if self.lockstep_state not in (LockstepState.IDLE, LockstepState.RUNNING):
            return False
        return self._leaves_below > self.epoch or any_has_ended(self.peers, self._replicas)

    @property
    def to_prepare(self) -> Membership | None:
        """Return the group to prepare now, beside the one that steps; None when there is none, or it was begun."""
        proposal = self._proposal
        if proposal is None or self._engine_id not in proposal.members or proposal.epoch <= self.preparing:
            return None
        return proposal

    @property
    def may_install(self) -> bool:
        """Tell whether the committed group is to be stepped in at once, because this rank steps in none."""
        return (
            self.lockstep_state in (LockstepState.OUTSIDE, LockstepState.PARKED)
            and self._engine_id in self.committed.members
            and self.committed.epoch > self.epoch
            and self.ready_epoch == self.committed.epoch
        )

    def header(self, num_tokens: int, *, has_work: bool, paused: bool, asleep: bool = False) -> StepHeader:
        """Return this rank's header of the step it is about to take."""
        # A rank that leaves has nothing to prepare: it is ready for a group that it is not in.
        is_ready = self._engine_id not in self.committed.members or self.ready_epoch == self.committed.epoch
        committed_epoch = self.committed.epoch if is_ready else self.epoch
        return StepHeader(
            self.epoch,
            self.wave,
            self.step,
            num_tokens,
            int(has_work),
            committed_epoch,
            int(paused),
            int(asleep),
        )

    def _wake(self) -> None:
        if self.lockstep_state is LockstepState.IDLE and self._wave_seen > self.wave:
            self.wave = self._wave_seen
            self.lockstep_state = LockstepState.RUNNING
