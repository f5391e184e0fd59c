"""Offline use with a real, small model: its texts are those of transformers."""

from pathlib import Path

from orchestrator.llm.offline import LLM, GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.unit.runner.families import VOCAB_SIZE, generate, save_family

PROMPTS = ["A shoal", "of fish", "A shoal moves as one", "x"]
NUM_TOKENS = 12


def test_two_ranks_in_one_process_answer_as_transformers_does(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    tokenizer = byte_tokenizer()  # its ids up to the model's vocabulary are all that is drawn
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    expected = generate(tmp_path, [list(prompt.encode()) for prompt in PROMPTS], NUM_TOKENS)
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(
        str(tmp_path), data_parallel_size=2, dtype="float32", device="cpu", kv_cache_memory="1MiB", progress=False
    ) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
        picks = [view.num_picks for view in llm.engine_views()]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.outputs[0].text for output in outputs] == [
        tokenizer.backend.decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}") for token_ids in expected
    ]
    assert max(map(max, expected)) < VOCAB_SIZE
    assert picks == [2, 2]
