"""The parameters of a generation: as a caller gives them, and as sampling parameters for one prompt on one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.wire.errors import InvalidRequestError
from engine.wire.sampling import SamplingParams
from orchestrator.llm.grammar import Grammar

_SEED_MODULUS = 1 << 63  # engines read seeds as non-negative 64-bit numbers


class EncodedRules(NamedTuple):
    """The parameters whose form depends on the model. bad_words: their tokens. grammar: in the engines' form."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None


_NO_RULES = EncodedRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Validated parameters of one request; ``SamplingParams`` holds the meaning of those named alike.

    n: choices per prompt. max_tokens: None takes ``default_max_tokens``, and that None takes all the room there is; 0
        draws nothing: the prompt alone is scored, or comes back with ``echo``.
    seed: None lets the server draw one per prompt. stop: strings that end a choice.
    data_parallel_rank: serve on this rank; None lets the load decide.
    bad_words: texts that never appear in the output, as far as tokens can tell.
    logprobs, prompt_logprobs: how many best tokens come with each token of output or prompt; None: no
        log-probabilities.
    echo: the prompt begins the text, and its tokens the log-probabilities.
    grammar: what the output must match.
    priority: lower is served first; equal ones in the order they came, as in vLLM.
    cache_salt: cached blocks of the prompt are shared only with requests of the same salt; None with those without one.
        Not empty. A caller who does not know it cannot find out, by how fast an answer comes, what others have asked.
    """

    n: int = 1
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    data_parallel_rank: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many best tokens an engine sends with each prompt token; None for no log-probabilities of them."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    def for_prompt(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        drawn_seed: int,
        prompt_field: str,
        encoded: EncodedRules = _NO_RULES,
    ) -> SamplingParams:
        """Return what travels to the engine for one prompt.

        drawn_seed: used when the caller gave none. prompt_field: the request field that holds the prompt, for the
        error. encoded: what was made of bad words and grammar.

        Raises:
            InvalidRequestError: prompt, or prompt and output, are longer than the model allows; names the limit.
        """
        max_tokens = self._max_tokens(num_prompt_tokens, max_model_len, prompt_field)
        if self.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than the {max_tokens} tokens the output may have", "min_tokens"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=(drawn_seed if self.seed is None else self.seed) % _SEED_MODULUS,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=encoded.bad_words,
            num_logprobs=self.logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            grammar=encoded.grammar,
        )

    def _max_tokens(self, num_prompt_tokens: int, max_model_len: int, prompt_field: str) -> int:
        room = max_model_len - num_prompt_tokens
        num_needed = 0 if self.max_tokens == 0 else 1  # a prompt that is only scored may fill the whole context
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token", prompt_field)
        if room < num_needed:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but this model's context is {max_model_len} tokens"
                + (", and at least one is needed for the output" if num_needed else ""),
                prompt_field,
            )
        if self.max_tokens is None:
            return room if self.default_max_tokens is None else min(room, self.default_max_tokens)
        if self.max_tokens > room:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens and {self.max_tokens} output tokens exceed this model's context of "
                f"{max_model_len} tokens; at most {room} output tokens fit behind this prompt",
                "max_tokens",
            )
        return self.max_tokens
