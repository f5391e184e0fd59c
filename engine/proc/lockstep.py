"""A rank of a lockstep group: the busy loop that steps when all step, and follows the group from epoch to epoch."""

import logging
import threading
import time
from collections.abc import Sequence

from engine.config.engine_spec import EngineSpec
from engine.core.lockstep import LockstepCore, LockstepRunner
from engine.interfaces.engine_core import EngineCore
from engine.interfaces.plan import Sample, StepPlan
from engine.parallel.epoch import EpochGroup, close_aside, prepare_epoch
from engine.parallel.group_member import DPGroupMember, StepVerdict
from engine.parallel.header import StepHeader, exchange_headers
from engine.parallel.store import StoreServer
from engine.parallel.transport import GroupBrokenError
from engine.proc.group_inbox import GroupInbox
from engine.proc.own_address import own_address
from engine.proc.proc import EngineCoreProc
from engine.wire.control import ClusterSettings, Membership
from engine.wire.errors import EngineDeadError, StartupError
from engine.wire.states import LockstepState

log = logging.getLogger(__name__)

_NOTHING = StepPlan(())
_PARKED_S = 30.0  # without a word from the coordinator; its group is gone, and somebody else may have its replica
_LOOK_S = 1.0


class DPEngineCoreProc(EngineCoreProc):
    """Adds waves and epochs to an engine's process; what it decides is in ``DPGroupMember``.

    The loop alone owns the member, the group and the runner. Groups are prepared in threads of their own, beside the
    one that steps, and handed over through ``GroupInbox``; so is what the coordinator says.

    A request is announced for only when the rank is in a group: before that it could only wait.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._channel = GroupInbox(self._shared)
        self._input.on_group_state = self._channel.see
        self._shared.count_collectives = self._count_collectives
        self._member = DPGroupMember(spec.engine_id)
        self._group: EpochGroup | None = None
        self._standby: EpochGroup | None = None
        self._parked_at = 0.0
        self._put_off: ClusterSettings | None = None  # settings that put to sleep, while others count on this rank
        self._is_announced = False
        self._collective_s = 0.0  # of the group it steps in, as far as they are counted

    def _begin(self, core: EngineCore) -> None:
        """Let no requests come yet: see ``_switch``."""

    def _loop(self, core: EngineCore) -> None:
        assert isinstance(core, LockstepCore), "a lockstep rank has a lockstep core"
        self._host = own_address(self._spec.report_endpoint)
        self._store = StoreServer(self._host)
        try:
            self._serve_together(core)
        finally:
            for group in (self._group, self._standby):
                if group is not None:
                    group.close()
            self._store.close()

    def _serve_together(self, core: LockstepCore) -> None:
        self._tell(core)
        while (
            intake := self._shared.take(self._member.lockstep_state is LockstepState.RUNNING, self._wait_s())
        ) is not None:
            if intake:
                self._admit(core, intake)
            self._follow(core)
            if self._member.lockstep_state is LockstepState.RUNNING:
                self._step_together(core)
            if (
                self._member.lockstep_state is not LockstepState.RUNNING
            ):  # before it waits: it came to rest for the sake of these
                self._apply_put_off(core)
                self._flush(core)
            self._tell(core)

    def _wait_s(self) -> float | None:
        """Return how long to sleep without work: for ever, but for a rank that is parked.

        Raises:
            EngineDeadError: it is parked, and nobody has told it anything for too long.
        """
        if self._member.lockstep_state is not LockstepState.PARKED:
            return None
        silent_s = time.monotonic() - max(self._parked_at, self._channel.heard_at)
        if silent_s > _PARKED_S:
            raise EngineDeadError(f"parked, and no word from the coordinator for {silent_s:.0f} s")
        return _LOOK_S

    # --- settings ---------------------------------------------------------------------------------------------------

    def _apply(self, settings: ClusterSettings) -> None:
        """Follow the operator, but go to sleep only when nobody steps: until then others count on this rank's experts.

        It brings no tokens of its own meanwhile, and nor does any other, so the group comes to rest.
        """
        self._put_off = (
            settings if settings.sleep_level and self._member.lockstep_state is LockstepState.RUNNING else None
        )
        if self._put_off is None:
            super()._apply(settings)
        else:
            self._shared.freeze()

    def _apply_put_off(self, core: LockstepCore) -> None:
        settings, self._put_off = self._put_off, None
        if settings is not None:
            super()._apply(settings)
            self._publish(core)

    # --- the group --------------------------------------------------------------------------------------------------

    def _follow(self, core: LockstepCore) -> None:
        """Do what the coordinator's newest state and finished preparations ask for.

        It is told at once, because the step that follows may wait for others, and they for what this rank says.
        """
        state, results = self._channel.take_state(), self._channel.take_prepared()
        if state is not None:
            was_parked = self._member.lockstep_state is LockstepState.PARKED
            self._member.on_state(state)
            if self._member.lockstep_state is LockstepState.PARKED and not was_parked:
                self._parked_at = time.monotonic()
        for epoch, prepared in results:
            self._on_prepared(epoch, prepared)
        if self._member.lockstep_state is LockstepState.PARKED:
            self._drop_group()
        wanted = self._member.to_prepare
        if wanted is not None:
            self._prepare(core.lockstep_runner, wanted)
        if self._member.may_install:
            self._switch(core)
        if state is not None or results:
            self._tell(core)

    def _prepare(self, runner: LockstepRunner, membership: Membership) -> None:
        """Begin to prepare a group beside the one in use; one prepared for an earlier attempt is dropped."""
        self._member.on_preparing(membership.epoch)
        if self._standby is not None:
            close_aside(self._standby)
            self._standby = None
        log.info("preparing epoch %d with ranks %s", membership.epoch, [m.rank for m in membership.members])
        threading.Thread(
            target=self._prepare_aside,
            args=(runner, membership, self._member.generation),
            name=f"shoal-prepare-epoch-{membership.epoch}",
            daemon=True,
        ).start()

    def _prepare_aside(self, runner: LockstepRunner, membership: Membership, generation: int) -> None:
        host, channel, epoch = self._host, self._channel, membership.epoch
        try:
            group = prepare_epoch(
                runner, self._spec.engine_id, membership, generation, host, lambda: channel.must_leave(epoch)
            )
        except (GroupBrokenError, StartupError) as error:
            log.warning("epoch %d cannot be prepared: %s", epoch, error)
            channel.post_prepared(epoch, None)
        except Exception:
            log.exception("epoch %d cannot be prepared", epoch)
            channel.post_prepared(epoch, None)
        else:
            channel.post_prepared(epoch, group)

    def _on_prepared(self, epoch: int, group: EpochGroup | None) -> None:
        if epoch != self._member.preparing:
            if group is not None:
                close_aside(group)
        elif group is None:
            self._channel.failed_epoch = epoch
        else:
            self._standby = group
            self._member.on_prepared(epoch)

    def _switch(self, core: LockstepCore) -> None:
        """Step in the committed group from now on: references change hands, and nothing waits."""
        self._member.on_switched()
        self._drop_group()
        if self._member.lockstep_state is LockstepState.OUTSIDE:
            log.info("left the group at epoch %d", self._member.committed.epoch)
            return
        group, self._standby = self._standby, None
        assert group is not None, "ready means that it is there"
        self._group = group.install(core.lockstep_runner)
        self._collective_s = group.collective_s  # without the exchanges of its preparation
        log.info("in epoch %d with ranks %s", self._member.epoch, [m.rank for m in group.membership.members])
        if not self._is_announced:
            self._is_announced = True
            self._input.announce(self._describe(core))

    def _count_collectives(self) -> int:
        group = self._group
        return 0 if group is None else group.num_entered

    def _drop_group(self) -> None:
        if self._group is not None:
            close_aside(self._group)
            self._group = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step_together(self, core: LockstepCore) -> None:
        """Take one step with all members; one that breaks is discarded and leaves no trace but its time."""
        assert self._group is not None, "who runs is in a group"
        may_step = self._pause_controller.may_step and self._put_off is None
        plan = core.scheduler.plan() if may_step else _NOTHING
        self._publish(core)  # a report sent while the step takes its time must not count those that run as waiting
        header = self._header(plan, may_step)
        try:
            verdict, samples = self._exchange(core.lockstep_runner, self._group, plan, header)
        except GroupBrokenError as error:
            log.warning("epoch %d broke: %s", self._member.epoch, error)
            self._member.on_broken()
            self._parked_at = time.monotonic()
            self._flush(core)
            return
        if may_step and (verdict.runs or not plan.chunks):
            self._tell_outputs(core, plan, samples)
        else:
            self._flush(core)
        if verdict.switches:
            self._switch(core)

    def _header(self, plan: StepPlan, may_step: bool) -> StepHeader:
        return self._member.header(
            plan.num_tokens,
            has_work=self._pause_controller.has_work,
            paused=not may_step,
            asleep=self._pause_controller.applied_settings.is_sleeping,
        )

    def _exchange(
        self, runner: LockstepRunner, group: EpochGroup, plan: StepPlan, header: StepHeader
    ) -> tuple[StepVerdict, Sequence[Sample]]:
        """Hear what all bring, and run the step when somebody brings anything; count what it spends in collectives."""
        try:
            headers = exchange_headers(group.headers, header)
            verdict = self._member.on_exchange(headers)
            if not verdict.runs:
                return verdict, ()
            samples = runner.run_shared(plan, [header.num_tokens for header in headers])
            self._channel.num_empty_steps += not plan.chunks
            return verdict, samples
        finally:
            collective_s = group.collective_s
            self._channel.collective_s += collective_s - self._collective_s
            self._collective_s = collective_s

    def _tell_outputs(self, core: LockstepCore, plan: StepPlan, samples: Sequence[Sample]) -> None:
        outputs = core.scheduler.apply(plan, samples, time.monotonic())
        report_seq = self._publish(core)
        if outputs:
            self._output.put(outputs, report_seq)

    def _tell(self, core: LockstepCore) -> None:
        """Let the next report show where this rank stands."""
        runner = core.lockstep_runner
        self._channel.publish(self._member, runner.num_experts, self._store.endpoint, runner.expert_loads())
