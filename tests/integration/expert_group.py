"""An expert-parallel group whose members are threads of this process: real weights, cores, connections and epochs."""

import itertools
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.parallel.epoch import EpochGroup, exchange_headers, prepare_epoch
from engine.parallel.group_member import StepHeader
from engine.parallel.runner import ParallelRunner
from engine.parallel.store import StoreServer
from engine.wire.control import Membership
from engine.wire.ids import EngineId
from lb.coordinator.expert_placement import place_experts
from tests.integration.exactness import CLIENT, make_request
from tests.unit.parallel.members import HOST, run_members
from tests.unit.runner.families import without_bars

_MAX_ARRIVALS = 3


class ExpertGroup:
    """Runners of one model by rank, and the group that some of them form now."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._model = ModelConfig(model=str(folder), dtype=dtype, device="cpu")
        self._store = StoreServer(HOST)
        self._is_over = threading.Event()
        self._epoch = 0
        self._groups: list[EpochGroup] = []
        self._members: list[int] = []
        self.runners: dict[int, ParallelRunner] = {}

    def __enter__(self) -> "ExpertGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()
        self._store.close()
        for runner in self.runners.values():
            runner.close()

    def form(self, ranks: Sequence[int], num_redundant: int = 0, *, ask_peers: bool = True) -> list[list[int]]:
        """Let these ranks be the group of the next epoch; return what each holds then."""
        for rank in ranks:
            self.load(rank)
        held = [list(self.runners[rank].rows.expert_ids) for rank in ranks]
        placement = place_experts(self.runners[ranks[0]].num_experts, held, num_redundant)
        self._epoch += 1
        membership = Membership(
            self._epoch,
            [EngineId(rank, 1) for rank in ranks],
            placement,
            self._store.endpoint,
            held if ask_peers else [],
        )

        def prepare(index: int) -> EpochGroup:
            rank = ranks[index]
            return prepare_epoch(
                self.runners[rank], EngineId(rank, 1), membership, 1, HOST, must_leave=self._is_over.is_set
            )

        groups = run_members(len(ranks), prepare, on_error=self._is_over.set)
        self._drop()
        self._members = list(ranks)
        self._groups = [group.install(self.runners[rank]) for rank, group in zip(ranks, groups, strict=True)]
        self._is_over.clear()
        return placement

    def answer(
        self, prompts: Sequence[list[int]], shares: Sequence[Sequence[int]], num_tokens: int, scheduler: SchedulerConfig
    ) -> list[list[int]]:
        """Return ``num_tokens`` of each prompt. shares: prompts of each member; how many arrive at a time is random."""
        answers: list[list[int]] = [[] for _ in prompts]

        def serve(index: int) -> int:
            member = _Member(self._groups[index], self.runners[self._members[index]], scheduler, seed=index)
            return member.serve(prompts, shares[index], num_tokens, answers)

        num_entered = run_members(len(self._groups), serve, on_error=self._is_over.set)
        assert len(set(num_entered)) == 1, f"members entered {num_entered} exchanges"
        self._is_over.clear()
        return answers

    def num_bytes(self, rank: int) -> int:
        """Return the bytes of all weights that a rank holds."""
        model = self.runners[rank]._model
        return sum(parameter.nbytes for parameter in model.parameters())

    def in_use(self, index: int) -> EpochGroup:
        """Return the group as one of its members has it."""
        return self._groups[index]

    def load(self, rank: int) -> None:
        """Load the dense weights of a rank that is not there yet."""
        if rank not in self.runners:
            scheduler = SchedulerConfig(kv_cache_memory_bytes=4 << 20)
            with without_bars():
                self.runners[rank] = ParallelRunner(self._model, scheduler, ParallelConfig(), lambda what, share: None)

    def _drop(self) -> None:
        for group in self._groups:
            group.close()
        self._groups = []


class _Member:
    """One member's loop, reduced: it steps while any member has work."""

    def __init__(self, group: EpochGroup, runner: ParallelRunner, scheduler: SchedulerConfig, seed: int) -> None:
        self._group = group
        self._runner = runner
        self._core = NativeCore(scheduler, runner)
        self._random = random.Random(seed)

    def serve(
        self, prompts: Sequence[list[int]], share: Sequence[int], num_tokens: int, answers: list[list[int]]
    ) -> int:
        """Answer a share of the prompts; return how many exchanges that took."""
        torch.set_num_threads(1)
        arriving = iter(share)
        num_waiting = len(share)
        for step in itertools.count():
            for index in itertools.islice(arriving, self._random.randrange(_MAX_ARRIVALS)):
                self._core.add_request(make_request(index, prompts[index], num_tokens), received_at=0.0)
                num_waiting -= 1
            if not self._step(step, has_more=num_waiting > 0, answers=answers):
                return self._group.num_entered
        raise AssertionError("unreachable")

    def _step(self, step: int, *, has_more: bool, answers: list[list[int]]) -> bool:
        plan = self._core.scheduler.plan()
        has_work = self._core.has_work() or has_more
        header = StepHeader(self._group.membership.epoch, 1, step, plan.num_tokens, int(has_work), 1, 0)
        headers = exchange_headers(self._group.headers, header)
        sizes = [header.num_tokens for header in headers]
        samples = self._runner.run_shared(plan, sizes) if any(sizes) else ()
        for output in self._core.scheduler.apply(plan, samples, 0.0).get(CLIENT, []):
            assert output.error is None, output.error
            answers[output.request_id].extend(output.new_token_ids)
        return any(header.has_work for header in headers)
