"""What the runner does beside computing the right tokens: limits, isolation, refusals."""

import threading
from pathlib import Path

import pytest
from transformers import BloomConfig, LlamaConfig, MambaConfig, Phi3Config
from transformers.utils.logging import disable_progress_bar

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.interfaces.engine_core import Runner
from engine.runner.torch_runner import TorchRunner
from engine.wire.errors import StartupError
from engine.wire.sampling import SamplingParams
from tests.unit.runner.driver import GREEDY, Driver
from tests.unit.runner.families import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    generate,
    poison_embedding,
    save_family,
    save_model,
)

SCHEDULER = SchedulerConfig(block_size=4, max_num_seqs=4, kv_cache_memory_bytes=8 << 20)
PROMPT = [11, 12, 13, 14, 15, 16]


def start(folder: Path, scheduler: SchedulerConfig = SCHEDULER, **model: object) -> TorchRunner:
    config = ModelConfig(model=str(folder), **{"dtype": "float32", **model})  # type: ignore[arg-type]
    return TorchRunner(config, scheduler, lambda what, share: None)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_family("llama", tmp_path)
    return tmp_path


def test_limits_say_what_the_model_can_do(llama: Path) -> None:
    runner: Runner = start(llama)
    limits = runner.limits
    assert (limits.max_model_len, limits.vocab_size, limits.block_size) == (MAX_POSITIONS, VOCAB_SIZE, 4)
    assert limits.eos_token_ids == {2}
    assert (limits.device, limits.dtype) == ("cpu", "float32")
    assert limits.num_blocks == 4 * MAX_POSITIONS // 4, "more than max_num_seqs full sequences would never be used"


def test_progress_goes_up_to_one(llama: Path) -> None:
    """Also where a lockstep rank of the same process has switched the library's bars off."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    seen: list[tuple[str, float]] = []
    TorchRunner(ModelConfig(model=str(llama)), SCHEDULER, lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("Loading weights" in what for what, _ in seen)


def test_a_chunk_that_does_not_reach_the_end_yields_no_sample(llama: Path) -> None:
    driver = Driver(start(llama))
    sequence = driver.add(PROMPT)
    assert driver.step([(sequence, 4)]) == []
    assert len(driver.step([(sequence, 4)])) == 1
    assert driver.step([]) == []


def test_other_threads_may_run_steps(llama: Path) -> None:
    driver = Driver(start(llama))
    outputs: list[list[int]] = []
    thread = threading.Thread(target=lambda: outputs.extend(driver.generate([driver.add(PROMPT)], 8, 64)))
    thread.start()
    thread.join()
    assert outputs == generate(llama, [PROMPT], 8)


def test_reduced_precision_runs(llama: Path) -> None:
    runner = start(llama, dtype="bfloat16")
    assert runner.limits.dtype == "bfloat16"
    driver = Driver(runner)
    (output,) = driver.generate([driver.add(PROMPT)], 8, 4)
    assert all(0 <= token < VOCAB_SIZE for token in output)


def test_a_failing_sequence_hurts_no_other_and_no_later_owner_of_its_blocks(llama: Path) -> None:
    poison = 5
    poison_embedding(llama, poison)
    expected = generate(llama, [PROMPT], 12)[0]
    driver = Driver(start(llama))
    good, bad = driver.add(PROMPT), driver.add([21, poison, *range(22, 36)])
    samples = driver.step([(bad, 64), (good, 64)])
    assert samples[0].error is not None
    assert "not a number" in samples[0].error
    assert samples[1].error is None
    driver.free(bad)
    heir = driver.add(PROMPT)
    assert driver.generate([good, heir], 12, 64) == [expected, expected]


def test_sequences_of_other_lengths_are_not_padded_with_anybodys_values(llama: Path) -> None:
    poison = 5
    poison_embedding(llama, poison)
    prompts = [list(range(20, 40)), [41, 42]]
    expected = generate(llama, prompts, 8)
    driver = Driver(start(llama))
    bad = driver.add([21, poison, *range(22, 70)])
    long, short = (driver.add(prompt) for prompt in prompts)
    driver.step([(bad, 30), (long, 64)])
    for _ in range(9):
        driver.step([(bad, 1), (long, 1), (short, 1)])
    assert [long.token_ids[20:28], short.token_ids[2:10]] == expected


def test_a_seeded_sequence_gets_the_same_tokens_alone_and_in_company(llama: Path) -> None:
    driver = Driver(start(llama))
    sampling = SamplingParams(max_tokens=99, temperature=0.9, top_p=0.9, seed=77)
    alone = driver.generate([driver.add(PROMPT, sampling)], 16, 64)[0]
    company = [driver.add([30 + i] * (i + 1), GREEDY) for i in range(2)]
    sequence = driver.add(PROMPT, sampling)
    assert driver.generate([company[0], sequence, company[1]], 16, 3)[1] == alone


def test_a_moved_sequence_goes_on_with_its_own_randomness(llama: Path) -> None:
    driver = Driver(start(llama))
    sampling = SamplingParams(max_tokens=99, temperature=0.9, seed=78)
    whole = driver.generate([driver.add(PROMPT, sampling)], 16, 64)[0]
    moved = driver.add(PROMPT, sampling)
    moved.token_ids += whole[:9]
    assert driver.generate([moved], 16, 5)[0] == whole


@pytest.mark.parametrize(
    ("model", "scheduler", "names"),
    [
        ({"max_model_len": MAX_POSITIONS + 1}, SCHEDULER, ["max_model_len=129", "128"]),
        ({}, SchedulerConfig(block_size=4, kv_cache_memory_bytes=50_000), ["kv_cache_memory_bytes", "max_model_len"]),
        ({"device": "cuda:9"}, SCHEDULER, ["cuda:9"]),
        ({"device": "toaster"}, SCHEDULER, ["toaster", "auto, cpu, cuda"]),
        ({"dtype": "int3"}, SCHEDULER, ["int3", "bfloat16"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    llama: Path, model: dict[str, object], scheduler: SchedulerConfig, names: list[str]
) -> None:
    with pytest.raises(StartupError) as refusal:
        start(llama, scheduler, **model)
    assert all(name in str(refusal.value) for name in names), refusal.value
    assert "\n" not in str(refusal.value)


def test_a_shorter_length_needs_less_memory(llama: Path) -> None:
    small = SchedulerConfig(block_size=4, kv_cache_memory_bytes=50_000)
    assert start(llama, small, max_model_len=32).limits.max_model_len == 32


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4),
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2),
    ],
    ids=["recurrent", "own position bias"],
)
def test_models_that_keep_their_past_otherwise_are_refused(config: object, tmp_path: Path) -> None:
    save_model(config, tmp_path)
    with pytest.raises(StartupError, match="cannot be"):
        start(tmp_path)


def test_a_model_whose_rotary_scale_depends_on_the_batch_is_served_up_to_where_it_switches(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10_000.0}
    config = Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters=rope | {"original_max_position_embeddings": 32},
        pad_token_id=0,
    )
    save_model(config, tmp_path)
    assert start(tmp_path).limits.max_model_len == 32


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(StartupError, match=tmp_path.name) as refusal:
        start(tmp_path)
    assert "\n" not in str(refusal.value)
