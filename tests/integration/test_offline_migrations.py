"""Death of a rank under every kind of generation: the answers are those of the unbroken run."""

from pathlib import Path
from typing import Any

import pytest

from client.core_thread import CoreThread
from orchestrator.llm.grammar import Grammar
from orchestrator.llm.offline import LLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.request_output import RequestOutput
from tests.integration.test_offline_torch import opened
from tests.unit.runner.families import embed

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fish", "shoal"]}, "big": {"type": "boolean"}},
    "required": ["kind", "big"],
    "additionalProperties": False,
}
COMMON: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
KINDS: dict[str, GenerationParams] = {
    "greedy": GenerationParams(**COMMON, temperature=0.0),
    "seeded": GenerationParams(**COMMON, seed=5, top_p=0.9),
    "samples": GenerationParams(**COMMON, seed=6, n=3),
    "stop string": GenerationParams(**COMMON, seed=7, stop=("zz", "qq"), include_stop_str_in_output=True),
    "logprobs": GenerationParams(**COMMON, seed=8, logprobs=2, prompt_logprobs=1),
    "echo": GenerationParams(**COMMON, seed=9, logprobs=1, echo=True),
    "penalties": GenerationParams(**COMMON, seed=10, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=9),
    "grammar": GenerationParams(max_tokens=48, seed=11, grammar=Grammar.json_schema(SCHEMA)),
    "bias": GenerationParams(**COMMON, seed=12, logit_bias={101: 3.0}, bad_words=("ee",)),
}


def generate(llm: LLM, folder: Path) -> dict[str, RequestOutput]:
    """Run every kind at once, and one prompt of embeddings."""
    prompts: list[Any] = [f"{name}: a shoal moves as one" for name in KINDS]
    embeds = embed(folder, [list(b"of fish")])[0].numpy()
    params = [*KINDS.values(), GenerationParams(**COMMON, temperature=0.0)]
    outputs = llm.generate([*prompts, embeds], params, progress=False)
    return dict(zip([*KINDS, "embeddings"], outputs, strict=True))


def die_after(num_frames: int, patch: pytest.MonkeyPatch) -> None:
    """Let rank 0 die in the step after so many output frames."""
    step = CoreThread._step

    def step_or_die(thread: CoreThread) -> None:
        if thread._engine_id.rank == 0 and thread._out_seq >= num_frames:
            raise RuntimeError("the device is lost")
        step(thread)

    patch.setattr(CoreThread, "_step", step_or_die)


def assert_same(name: str, got: RequestOutput, expected: RequestOutput) -> None:
    assert got.error is None, name
    assert got.num_cached_tokens == expected.num_cached_tokens, name
    assert _values(got.prompt_logprobs) == pytest.approx(_values(expected.prompt_logprobs), abs=1e-4), name
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        answer = ours.text, ours.token_ids, ours.finish_reason
        assert answer == (theirs.text, theirs.token_ids, theirs.finish_reason), name
        assert _values(ours.logprobs) == pytest.approx(_values(theirs.logprobs), abs=1e-4), name


def _values(scored: Any) -> list[float]:
    return [token.logprob for token in scored or () if token.logprob is not None]


def test_sequences_of_a_dead_rank_go_on_without_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, data_parallel_size=2) as llm:
        unbroken = generate(llm, tmp_path)
    assert not [output.error for output in unbroken.values() if output.error]
    for num_frames in (4, 15):
        with monkeypatch.context() as patch, opened(tmp_path, data_parallel_size=2) as llm:
            die_after(num_frames, patch)
            outputs = generate(llm, tmp_path)
            statistics = llm.statistics()
        assert statistics["moves_death"] >= 4
        assert statistics["waiting_to_move"] == statistics["in_flight"] == 0
        for name, output in outputs.items():
            assert_same(f"{name} after {num_frames} frames", output, unbroken[name])
