"""A core that has served thousands of requests holds no more than one that has served hundreds."""

import gc
import random
import tracemalloc
from pathlib import Path

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.core.native import NativeCore
from engine.sim.runner import SimRunner
from engine.wire.messages import AddRequest
from engine.wire.sampling import SamplingParams
from tests.unit.engine.builders import CLIENT

NUM_REQUESTS = 5_000
NUM_WARM = 500
NUM_AT_ONCE = 40
MAX_GROWTH = 1.02


def make_core() -> NativeCore:
    scheduler = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)
    sim = SimConfig(num_kv_tokens=8_192, max_model_len=512)
    return NativeCore(scheduler, SimRunner(sim, scheduler, sleep=lambda _: None))


def random_request(rng: random.Random, request_id: int) -> AddRequest:
    """Return a request of random length, priority and salt; half of them begin like an earlier one."""
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
    if rng.random() < 0.5:
        prompt = [65] * rng.randrange(1, 150) + prompt[:20]
    sampling = SamplingParams(max_tokens=rng.randrange(1, 24), seed=request_id)
    salt = rng.choice([None, None, f"tenant {request_id}"])
    return AddRequest(CLIENT, 0, request_id, 0, 0, prompt, [], sampling, rng.randrange(2), salt)


def serve(core: NativeCore, rng: random.Random, first_id: int, end_id: int) -> None:
    """Serve requests, so many at a time and now and then aborting one, until all have ended."""
    unfinished: set[int] = set()
    while first_id < end_id or unfinished:
        while first_id < end_id and len(unfinished) < NUM_AT_ONCE:
            core.add_request(random_request(rng, first_id), received_at=0.0)
            unfinished.add(first_id)
            first_id += 1
        if rng.random() < 0.02:
            core.abort_requests([((rng.choice(sorted(unfinished)), 0), 0)])
        for outputs in core.step(0.0).values():
            unfinished -= {output.request_id for output in outputs if output.finish_reason is not None}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_stays_where_it_was_after_the_first_requests_and_every_block_comes_back() -> None:
    tracemalloc.start()
    try:
        core, rng = make_core(), random.Random(1)
        serve(core, rng, 0, NUM_WARM)
        gc.collect()
        traced, resident = tracemalloc.get_traced_memory()[0], resident_bytes()
        serve(core, rng, NUM_WARM, NUM_REQUESTS)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MAX_GROWTH * traced
        assert resident_bytes() < MAX_GROWTH * resident
    finally:
        tracemalloc.stop()
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.kv_usage) == (0, 0, 0, 0.0)
    assert load.num_prefix_hit_tokens > 0
    assert load.num_preemptions > 0
    assert not core.has_work()
