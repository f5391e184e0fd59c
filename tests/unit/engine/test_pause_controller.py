"""What each pause mode and sleep level does to a real core: between two steps, without a process around it."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.core.native import NativeCore
from engine.proc.pause_controller import AppliedSettings, PauseController
from engine.sim.runner import SimRunner
from engine.wire.control import ClusterSettings, PauseMode
from engine.wire.messages import EngineCoreOutput, FinishReason
from tests.unit.engine.builders import CLIENT, make_request

RANK = 3
RUN, ABORT, WAIT, KEEP = PauseMode


class Loop:
    """The busy loop of one engine, turned by hand."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        runner = SimRunner(SimConfig(load_s=2.0), SchedulerConfig(), sleep=self._sleep)
        self.core = NativeCore(SchedulerConfig(), runner)
        self.controller = PauseController(self.core, RANK)
        self.outputs: dict[int, list[EngineCoreOutput]] = {}
        self._seq = 0
        self.progress: list[str] = []

    def add(self, request_id: int, **sampling: Any) -> None:
        self.core.add_request(make_request(request_id, **sampling), 0.0)

    def set(self, pause: PauseMode = RUN, sleep_level: int = 0, cordoned: tuple[int, ...] = ()) -> None:
        self._seq += 1
        settings = ClusterSettings(self._seq, pause, sleep_level, list(cordoned))
        assert self.controller.apply(settings, lambda detail, _share: self.progress.append(detail))
        self.turn(0)

    def turn(self, num_steps: int = 1) -> int:
        """Run up to so many steps; return how many could run."""
        done = 0
        while done < num_steps and self.controller.has_work:
            self._take(self.core.step(0.0).get(CLIENT, []))
            done += 1
        if not self.controller.may_step:
            self._take(self.core.scheduler.flush().get(CLIENT, []))
        return done

    def end_of(self, request_id: int) -> FinishReason | None:
        return next((o.finish_reason for o in self.outputs.get(request_id, []) if o.finish_reason is not None), None)

    def num_tokens(self, request_id: int) -> int:
        return sum(len(output.new_token_ids) for output in self.outputs.get(request_id, []))

    def is_in_force(self) -> bool:
        return self.controller.applied_settings.settings_seq == self._seq

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def _sleep(self, duration_s: float) -> None:
        self.slept_s += duration_s


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.core.close()


def test_abort_ends_what_came_before_and_holds_what_comes_after(loop: Loop) -> None:
    loop.add(1, max_tokens=50)
    loop.turn(3)
    loop.set(ABORT)
    assert loop.is_in_force()
    assert loop.end_of(1) is FinishReason.ABORT
    loop.add(2, max_tokens=2)
    assert loop.turn(5) == 0
    assert loop.core.load().num_waiting == 1
    loop.set(RUN)
    loop.turn(5)
    assert loop.end_of(2) is FinishReason.LENGTH


def test_wait_is_in_force_once_what_came_before_has_finished(loop: Loop) -> None:
    loop.add(1, max_tokens=5)
    loop.turn(2)
    loop.set(WAIT)
    loop.add(2, max_tokens=2)
    assert not loop.is_in_force()
    assert loop.turn(50) == 3
    assert loop.is_in_force()
    assert loop.end_of(1) is FinishReason.LENGTH
    assert loop.num_tokens(2) == 0
    assert loop.controller.applied_settings.is_frozen


def test_keep_freezes_at_once_and_nothing_is_lost(loop: Loop) -> None:
    loop.add(1, max_tokens=5)
    loop.turn(2)
    usage = loop.core.load().kv_usage
    loop.set(KEEP)
    assert loop.is_in_force()
    assert loop.turn(10) == 0
    assert loop.core.load().kv_usage == usage > 0
    loop.set(RUN)
    loop.turn(10)
    assert (loop.end_of(1), loop.num_tokens(1)) == (FinishReason.LENGTH, 5)
    assert loop.core.load().num_preemptions == 0


def test_what_is_told_without_a_step_is_told_during_a_pause(loop: Loop) -> None:
    loop.add(1, max_tokens=5)
    loop.set(KEEP)
    loop.core.abort_requests([((1, 0), 0)])
    loop.core.add_request(make_request(2, (999,)), 0.0)  # no token of this vocabulary
    loop.turn()
    assert (loop.end_of(1), loop.end_of(2)) == (FinishReason.ABORT, FinishReason.ERROR)


def test_the_same_pause_twice_and_a_resume_without_a_pause_change_nothing(loop: Loop) -> None:
    loop.set(RUN)
    assert loop.is_in_force()
    loop.set(ABORT)
    loop.add(1)
    loop.set(ABORT)
    assert loop.is_in_force()
    assert loop.end_of(1) is None
    loop.set(RUN)
    loop.set(RUN)
    loop.turn(10)
    assert loop.end_of(1) is FinishReason.LENGTH


@pytest.mark.parametrize("then", [ABORT, WAIT])
def test_another_mode_decides_about_what_came_before_the_first_pause_alone(loop: Loop, then: PauseMode) -> None:
    loop.add(1, max_tokens=3)
    loop.set(KEEP)
    loop.add(2, max_tokens=3)
    loop.set(then)
    loop.turn(20)
    assert loop.is_in_force()
    assert loop.end_of(1) is (FinishReason.ABORT if then is ABORT else FinishReason.LENGTH)
    assert loop.num_tokens(2) == 0
    loop.set(RUN)
    loop.turn(20)
    assert loop.end_of(2) is FinishReason.LENGTH


def test_keep_stops_a_wait_that_is_not_over(loop: Loop) -> None:
    loop.add(1, max_tokens=9)
    loop.turn()
    loop.set(WAIT)
    loop.turn()
    loop.set(KEEP)
    assert loop.is_in_force()
    assert loop.turn(10) == 0


def test_a_resume_ends_a_wait_that_is_not_over(loop: Loop) -> None:
    loop.add(1, max_tokens=9)
    loop.set(WAIT)
    loop.add(2, max_tokens=9)
    loop.set(RUN)
    assert loop.is_in_force()
    loop.turn(20)
    assert loop.end_of(1) is loop.end_of(2) is FinishReason.LENGTH


def test_wait_waits_for_the_sequences_of_a_stalled_client_too(loop: Loop) -> None:
    loop.add(1, max_tokens=3)
    loop.turn()
    loop.core.scheduler.stall_client(CLIENT)
    loop.set(WAIT)
    assert loop.turn(5) == 0
    assert not loop.is_in_force()
    loop.core.scheduler.resume_client(CLIENT)
    loop.turn(5)
    assert loop.is_in_force()
    assert loop.num_tokens(1) == 3


def test_a_client_that_stalls_and_resumes_during_a_pause_keeps_its_place(loop: Loop) -> None:
    loop.set(KEEP)
    loop.add(1, max_tokens=3)
    loop.core.scheduler.stall_client(CLIENT)
    loop.set(RUN)
    assert loop.turn(5) == 0
    loop.core.scheduler.resume_client(CLIENT)
    loop.turn(5)
    assert loop.end_of(1) is FinishReason.LENGTH


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_every_block_back_and_the_streams_go_on_after_it(loop: Loop, level: int) -> None:
    whole = Loop()
    whole.add(1, max_tokens=9)
    whole.turn(20)
    loop.add(1, max_tokens=9)
    loop.turn(4)
    loop.slept_s = 0.0
    loop.set(sleep_level=level)
    assert loop.controller.applied_settings == AppliedSettings(1, is_sleeping=True, is_frozen=True)
    assert loop.core.load().kv_usage == 0
    loop.add(2, max_tokens=1)
    assert loop.turn(5) == 0
    loop.set()
    assert loop.slept_s == pytest.approx(2.0 if level == 2 else 0.0)
    assert bool(loop.progress) is (level == 2)
    loop.turn(20)
    tokens = [[t for o in each.outputs[1] for t in o.new_token_ids] for each in (loop, whole)]
    assert tokens[0] == tokens[1]
    assert loop.end_of(2) is FinishReason.LENGTH


def test_sleep_goes_deeper_and_a_pause_outlives_it(loop: Loop) -> None:
    loop.add(1, max_tokens=3)
    loop.set(KEEP)
    loop.set(KEEP, sleep_level=1)
    loop.set(KEEP, sleep_level=2)
    loop.slept_s = 0.0
    loop.set(KEEP)
    assert loop.slept_s == pytest.approx(2.0)
    assert loop.controller.applied_settings == AppliedSettings(4, is_sleeping=False, is_frozen=True)
    assert loop.turn(5) == 0
    loop.set(RUN)
    loop.turn(5)
    assert loop.end_of(1) is FinishReason.LENGTH


def test_a_sleep_interrupts_a_wait_which_goes_on_afterwards(loop: Loop) -> None:
    loop.add(1, max_tokens=5)
    loop.turn()
    loop.set(WAIT)
    loop.set(WAIT, sleep_level=1)
    assert loop.is_in_force()
    assert loop.turn(5) == 0
    loop.set(WAIT)
    assert not loop.is_in_force()
    loop.turn(10)
    assert loop.is_in_force()
    assert loop.end_of(1) is FinishReason.LENGTH


def test_older_settings_and_repetitions_change_nothing(loop: Loop) -> None:
    loop.set(KEEP)
    assert not loop.controller.apply(ClusterSettings(1, RUN), lambda *_: None)
    assert not loop.controller.apply(ClusterSettings(), lambda *_: None)
    assert not loop.controller.may_step


@pytest.mark.parametrize(("cordoned", "is_cordoned"), [((), False), ((1, 2), False), ((1, RANK), True)])
def test_a_cordon_names_ranks_and_freezes_nobody(loop: Loop, cordoned: tuple[int, ...], is_cordoned: bool) -> None:
    loop.set(cordoned=cordoned)
    assert loop.controller.is_cordoned is is_cordoned
    assert loop.controller.may_step
