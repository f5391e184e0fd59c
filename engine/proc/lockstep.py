"""The busy loop of a rank in a lockstep group: it steps when all step, and follows the group from epoch to epoch."""

import logging
import socket
import threading
import time
from collections.abc import Sequence

from engine.core.lockstep import LockstepCore
from engine.interfaces.plan import Sample, StepPlan
from engine.parallel.epoch import EpochGroup, close_aside, exchange_headers, prepare_epoch
from engine.parallel.group_member import DPGroupMember, StepHeader, StepVerdict
from engine.parallel.store import StoreServer
from engine.parallel.transport import GroupBrokenError
from engine.proc.group_inbox import GroupInbox
from engine.proc.proc import EngineCoreProc, EngineIO
from engine.wire.control import ClusterSettings, Membership, MemberStatus
from engine.wire.errors import EngineDeadError, StartupError
from engine.wire.states import LockstepState

log = logging.getLogger(__name__)

_NOTHING = StepPlan(())
_PARKED_S = 30.0  # without a state of the coordinator; its group is gone, and another may have its replica
_LOOK_S = 1.0
_LOOPBACK = "127.0.0.1"


class DPEngineCoreProc(EngineCoreProc):
    """Adds waves and epochs to an engine's busy loop; what it decides is in ``DPGroupMember``.

    The loop alone owns the member, the group and the runner. Groups are prepared in threads of their own, beside the
    one that steps, and handed over through ``GroupInbox``; so are states of the coordinator.

    Clients are connected to only when the rank is in a group: before that their requests could only wait.
    """

    _core: LockstepCore

    def __init__(self, io: EngineIO, core: LockstepCore, inbox: GroupInbox) -> None:
        """Make the loop of a loaded core; serves a store for its group from here on. inbox: fed by ``io``.

        Raises:
            OSError: there is no way to the coordinator's host. AddressError: no port is free on the way to it.
        """
        super().__init__(io, core)
        self._inbox = inbox
        self._runner = core.lockstep_runner
        self._member = DPGroupMember(io.spec.engine_id)
        self._host = own_address(io.spec.report_endpoint)
        self._store = StoreServer(self._host)
        self._group: EpochGroup | None = None  # in which it steps
        self._standby: EpochGroup | None = None  # prepared, to step in from the next switch on
        self._failed_epoch = 0
        self._parked_at = 0.0
        self._put_off: ClusterSettings | None = None  # settings that put to sleep, while others count on this rank
        self._is_announced = False
        self._num_empty_steps = 0
        self._collective_s = 0.0  # of all groups so far
        self._group_collective_s = 0.0  # of the group it steps in, as far as it is counted above
        self._shared.watch_collectives(self._count_collectives)

    def _begin(self) -> None:
        """Let no requests come yet: see ``_switch``."""

    def _loop(self) -> None:
        try:
            self._serve_together()
        finally:
            for group in (self._group, self._standby):
                if group is not None:
                    group.close()
            self._store.close()

    def _serve_together(self) -> None:
        self._report_member()
        while (intake := self._shared.take(self._is_running, self._wait_s())) is not None:
            if intake:
                self._admit(intake)
            self._follow()
            if self._is_running:
                self._step_together()
            if not self._is_running:  # before it waits: it came to rest for the sake of these
                self._apply_put_off()
                self._flush()
            self._report_member()

    @property
    def _is_running(self) -> bool:
        return self._member.lockstep_state is LockstepState.RUNNING

    def _wait_s(self) -> float | None:
        """Return how long to sleep without work: for ever, unless the rank is parked.

        Raises:
            EngineDeadError: it is parked, and has heard nothing of the coordinator for too long.
        """
        if self._member.lockstep_state is not LockstepState.PARKED:
            return None
        silent_s = time.monotonic() - max(self._parked_at, self._inbox.heard_at)
        if silent_s > _PARKED_S:
            raise EngineDeadError(f"parked, and no word from the coordinator for {silent_s:.0f} s")
        return _LOOK_S

    # --- settings ---------------------------------------------------------------------------------------------------

    def _apply(self, settings: ClusterSettings) -> None:
        """Bring settings into force, but sleep only when no rank steps: until then others count on its experts.

        It brings no tokens of its own meanwhile, and nor does any other, so the group comes to rest.
        """
        self._put_off = settings if settings.sleep_level and self._is_running else None
        if self._put_off is None:
            super()._apply(settings)
        else:
            self._shared.freeze()

    def _apply_put_off(self) -> None:
        settings, self._put_off = self._put_off, None
        if settings is not None:
            super()._apply(settings)
            self._publish()

    # --- the group --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Do what the coordinator's newest state and finished preparations ask for."""
        state, results = self._inbox.take_state(), self._inbox.take_prepared()
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
            self._prepare(wanted)
        if self._member.may_install:
            self._switch()
        if state is not None or results:
            # Not only behind the step: that may wait for other ranks, and they for what this one reports.
            self._report_member()

    def _prepare(self, membership: Membership) -> None:
        """Begin to prepare a group beside the one in use; one prepared for an earlier attempt is dropped."""
        self._member.on_preparing(membership.epoch)
        if self._standby is not None:
            close_aside(self._standby)
            self._standby = None
        log.info("preparing epoch %d with ranks %s", membership.epoch, [m.rank for m in membership.members])
        threading.Thread(
            target=self._prepare_aside,
            args=(membership, self._member.generation),  # taken here: the member is the loop's alone
            name=f"shoal-prepare-epoch-{membership.epoch}",
            daemon=True,
        ).start()

    def _prepare_aside(self, membership: Membership, generation: int) -> None:
        """Prepare a group and leave it to the loop, or None; runs in a thread of its own."""
        epoch, group = membership.epoch, None
        try:
            group = prepare_epoch(
                self._runner, self._spec.engine_id, membership, generation, self._host, lambda: self._must_leave(epoch)
            )
        except (GroupBrokenError, StartupError) as error:
            log.warning("epoch %d cannot be prepared: %s", epoch, error)
        except Exception:
            log.exception("epoch %d cannot be prepared", epoch)
        self._inbox.post_prepared(epoch, group)
        self._shared.wake()

    def _must_leave(self, epoch: int) -> bool:
        """Tell whether to leave a collective of this epoch; any thread."""
        return self._inbox.must_leave(epoch) or self._shared.stop_reason is not None

    def _on_prepared(self, epoch: int, group: EpochGroup | None) -> None:
        if epoch != self._member.preparing:
            if group is not None:
                close_aside(group)
        elif group is None:
            self._failed_epoch = epoch
        else:
            self._standby = group
            self._member.on_prepared(epoch)

    def _switch(self) -> None:
        """Step in the committed group from now on: references change hands, and nothing waits."""
        self._member.on_switched()
        self._drop_group()
        if self._member.lockstep_state is LockstepState.OUTSIDE:
            log.info("left the group at epoch %d", self._member.committed.epoch)
            return
        group, self._standby = self._standby, None
        assert group is not None, "ready means that it is there"
        self._group = group.install(self._runner)
        self._group_collective_s = group.collective_s  # without the exchanges of its preparation
        log.info("in epoch %d with ranks %s", self._member.epoch, [m.rank for m in group.membership.members])
        if not self._is_announced:
            self._is_announced = True
            self._io.input.announce(self._describe())

    def _drop_group(self) -> None:
        if self._group is not None:
            close_aside(self._group)
            self._group = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step_together(self) -> None:
        """Take one step with all members; one that breaks is discarded and leaves no trace but its time."""
        assert self._group is not None, "a running rank is in a group"
        may_step = self._pause_controller.may_step and self._put_off is None
        plan = self._core.scheduler.plan() if may_step else _NOTHING
        self._publish()  # a report sent while the step takes its time must not count those that run as waiting
        header = self._header(plan, may_step)
        try:
            verdict, samples = self._exchange(self._group, plan, header)
        except GroupBrokenError as error:
            log.warning("epoch %d broke: %s", self._member.epoch, error)
            self._member.on_broken()
            self._parked_at = time.monotonic()
            self._flush()
            return
        if may_step and (verdict.runs or not plan.chunks):
            outputs = self._core.scheduler.apply(plan, samples, time.monotonic())
            self._output.put(outputs, self._publish())
        else:
            self._flush()  # and drop the plan: the next one starts from the same tokens
        if verdict.switches:
            self._switch()

    def _header(self, plan: StepPlan, may_step: bool) -> StepHeader:
        return self._member.header(
            plan.num_tokens,
            has_work=self._pause_controller.has_work,
            paused=not may_step,
            asleep=self._pause_controller.applied_settings.is_sleeping,
        )

    def _exchange(self, group: EpochGroup, plan: StepPlan, header: StepHeader) -> tuple[StepVerdict, Sequence[Sample]]:
        """Exchange headers, and run the step when any member has tokens; count the time inside collectives.

        Raises:
            GroupBrokenError: a member is gone, or this one is to leave.
        """
        try:
            headers = exchange_headers(group.headers, header)
            verdict = self._member.on_exchange(headers)
            if not verdict.runs:
                return verdict, ()
            samples = self._runner.run_shared(plan, [header.num_tokens for header in headers])
            self._num_empty_steps += not plan.chunks
            return verdict, samples
        finally:
            collective_s = group.collective_s
            self._collective_s += collective_s - self._group_collective_s
            self._group_collective_s = collective_s

    # --- the report -------------------------------------------------------------------------------------------------

    def _report_member(self) -> None:
        """Let the next report show where this rank is in its group."""
        member, runner = self._member, self._runner
        self._inbox.note_position(member.epoch, member.peers)
        self._shared.show_member(
            member.lockstep_state.phase,
            epoch=member.epoch,
            ready_epoch=member.ready_epoch,
            max_epoch_seen=member.max_epoch_seen,
            wave=member.wave,
            member=MemberStatus(
                runner.num_experts,
                self._store.endpoint,
                member.committed,
                self._failed_epoch,
                runner.expert_loads(),
                self._num_empty_steps,
                self._collective_s,
                member.broken_epoch,
            ),
        )

    def _count_collectives(self) -> int:
        """Return how many collectives of its group it has begun; the input thread asks, also while a step hangs."""
        group = self._group
        return 0 if group is None else group.num_entered


def own_address(coordinator_endpoint: str) -> str:
    """Return this host's address on the way to a ZeroMQ endpoint; loopback when that is on this host.

    Raises:
        OSError: there is no way to the coordinator's host.
    """
    transport, _, address = coordinator_endpoint.partition("://")
    if transport != "tcp":
        return _LOOPBACK
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket sends nothing for that: it only looks up the route
        return str(probe.getsockname()[0])
