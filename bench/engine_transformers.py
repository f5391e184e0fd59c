"""The references of the engine benchmark: the same model and machine with what transformers itself brings."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from bench.engine_loads import Load
from engine.config.engine_config import ModelConfig
from engine.model.loader import load_model

PADDED_BATCH = 32

_PAGE_TOKENS = 32
_STEP_TOKENS = 512
_RESULT_TIMEOUT_S = 600.0


class TransformersModel:
    """A model as ``from_pretrained`` gives it, with PyTorch's attention."""

    def __init__(self, model: str, dtype: str, num_threads: int) -> None:
        config = ModelConfig(model=model, dtype=dtype, num_threads=num_threads)
        self._model: Any = load_model(config, "sdpa", lambda what, share: None).model
        torch.set_num_threads(num_threads)

    def loop_static_batch(self, load: Load) -> None:
        """Answer requests of one length in one batch: forward, greedy choice, forward; nothing between them."""
        cache = DynamicCache(config=self._model.config)
        token_ids = torch.tensor(load.prompts)
        with torch.inference_mode():
            for _ in range(load.num_outputs[0]):
                output = self._model(input_ids=token_ids, cache=cache, use_cache=True, logits_to_keep=1)
                token_ids = output.logits[:, -1].float().argmax(dim=-1)[:, None]
                token_ids.tolist()  # somebody is told

    def generate_padded(self, load: Load) -> None:
        """Answer requests with ``generate``, in padded batches in the order of arrival."""
        for first in range(0, len(load.prompts), PADDED_BATCH):
            prompts = load.prompts[first : first + PADDED_BATCH]
            longest = max(map(len, prompts))
            padding = [longest - len(prompt) for prompt in prompts]
            num_new = max(load.num_outputs[first : first + PADDED_BATCH])
            self._model.generate(
                torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )

    def generate_continuously(self, load: Load) -> None:
        """Answer requests with the library's own continuous batching."""
        longest = max(len(prompt) + num for prompt, num in zip(load.prompts, load.num_outputs, strict=True))
        config = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=len(load.prompts) * -(-longest // _PAGE_TOKENS),  # nobody has to wait for memory
            max_batch_tokens=_STEP_TOKENS,
            allow_block_sharing=False,
        )
        generation: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            manager = self._model.init_continuous_batching(generation, config)
            manager.start()
        try:
            for prompt, num_output in zip(load.prompts, load.num_outputs, strict=True):
                manager.add_request(prompt, max_new_tokens=num_output, eos_token_id=-1)
            results = [manager.get_result(timeout=_RESULT_TIMEOUT_S) for _ in load.prompts]
        finally:
            manager.stop(block=True)
        assert all(result is not None and result.error is None for result in results), results
        assert sum(len(result.generated_tokens) for result in results) == sum(load.num_outputs)
