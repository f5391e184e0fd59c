"""What the engine benchmark asks for, and what answering it cost."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

VOCAB_SIZE = 49_152
_FIRST_WORD = 100  # below are the special tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once. prompts: token ids. num_outputs: tokens wanted of each, end tokens or not."""

    prompts: list[list[int]]
    num_outputs: list[int]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a load took: seconds of wall and of CPU, all threads together, for the output tokens that were wanted."""

    wall_s: float
    cpu_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Return wanted output tokens per second of wall."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Return wanted output tokens per second of CPU."""
        return self.num_tokens / self.cpu_s


def equal_load(num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> Load:
    """Return requests of one length, which a static batch serves without any waste."""
    rng = random.Random(num_requests)
    prompts = [_prompt(rng, num_prompt_tokens) for _ in range(num_requests)]
    return Load(prompts, [num_output_tokens] * num_requests)


def mixed_load(num_requests: int, max_prompt_tokens: int, max_output_tokens: int) -> Load:
    """Return requests of 16 to so many tokens in and out, evenly distributed and independent."""
    rng = random.Random(7)
    prompts = [_prompt(rng, rng.randint(16, max_prompt_tokens)) for _ in range(num_requests)]
    return Load(prompts, [rng.randint(16, max_output_tokens) for _ in prompts])


def measure(run: Callable[[Load], None], load: Load) -> Cost:
    """Serve a load and return what it took."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    run(load)
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s, sum(load.num_outputs))


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(_FIRST_WORD, VOCAB_SIZE) for _ in range(num_tokens)]
