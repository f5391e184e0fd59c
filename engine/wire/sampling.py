"""Parameters of a sequence, as they travel with every request: sampling of its tokens, or pooling to one vector."""

from msgspec import Struct

MAX_LOGPROBS = 20
"""Best tokens per position at most."""

EMBEDS_DTYPES = ("float32", "float16", "bfloat16")
"""Number formats of prompt embeddings."""


class SamplingParams(Struct, array_like=True, frozen=True, kw_only=False):
    """Sampling parameters of one sequence. Append-only: new fields go last, with a default.

    max_tokens: output tokens at most, counted over all attempts of the sequence; 0 draws none.
    min_tokens: output tokens before an end-of-sequence or stop token may end the sequence.
    temperature: 0 is greedy.
    top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
    top_k: keep the k best tokens; 0 keeps all.
    min_p: drop tokens below this share of the best token's probability, in [0, 1].
    seed: always set; the client draws one when the user gave none, so that a resumed sequence goes on with its own
        randomness.
    stop_token_ids: tokens that end the sequence with finish reason ``stop`` and are not part of the text.
    ignore_eos: go on past the model's end-of-sequence tokens.
    presence_penalty, frequency_penalty: taken from the score of a token that is in the output, once and for each time.
    repetition_penalty: scores of tokens in prompt or output are divided by it, negative ones multiplied; 1 is off.
    logit_bias: token -> number added to its score.
    allowed_token_ids: no other tokens are drawn; empty allows all.
    bad_words: token sequences that never get complete in the output.
    num_logprobs: log-probabilities of each output token and of so many best ones at its place; None for none.
    num_prompt_logprobs: the same of each prompt token but the first.
    grammar: what the output must match, in llguidance's form, checked by its sender; None for anything.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str | None = None


class PoolingParams(Struct, array_like=True, frozen=True):
    """The sequence is to end with one vector instead of tokens: the final hidden state of its last prompt token.

    normalize: scale it to length 1.
    """

    normalize: bool = True
