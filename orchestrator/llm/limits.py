"""The limits of the served model, and the checks of a request against them; bad words and grammars become tokens.

The engines check again when a request arrives; here it fails before it costs anything.
"""

from collections.abc import Iterable, Sequence

from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.sampling import EMBEDS_DTYPES
from engine.wire.tensors import Tensor
from lb.views.engine_view import EngineView
from orchestrator.llm.grammar import GrammarChecker
from orchestrator.llm.params import EncodedRules, GenerationParams
from orchestrator.llm.tokenizer import TextTokenizer

MAX_EMBEDS_BYTES = 128 * 1024 * 1024
"""Embeddings of one request at most, counted once per sample: each sample's engine gets its own. Half of what a message
may have."""

MIN_PRIORITY, MAX_PRIORITY = -(1 << 63), (1 << 63) - 1
"""Priorities travel as 64-bit numbers."""


class ModelLimits:
    """Limits of the model, the same for the whole deployment: learned from the first engine that is ready.

    max_model_len: 0 until then.
    """

    def __init__(self) -> None:
        self.max_model_len = 0
        self.features: frozenset[str] = frozenset()
        self._vocab_size = 0
        self._hidden_size = 0

    def learn(self, views: Iterable[EngineView]) -> None:
        """Take the limits from what is known of the engines; once is enough.

        Raises:
            OverloadedError: none is ready yet.
        """
        ready = next((view.ready for view in views if view.ready is not None), None)
        if ready is None:
            raise OverloadedError("no engine is ready yet")
        self.max_model_len, self.features = ready.max_model_len, frozenset(ready.features)
        self._vocab_size, self._hidden_size = ready.vocab_size, ready.hidden_size

    def check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse, with ``InvalidRequestError``, tokens that the model does not have."""
        # min and max: two passes in C cost less than one in Python
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise InvalidRequestError(f"token ids must be in [0, {self._vocab_size})", field)

    def check_embeds(self, embeds: Tensor, num_samples: int) -> None:
        """Refuse, with ``InvalidRequestError``, embeddings that are none of this model's."""
        if "prompt_embeds" not in self.features:
            raise InvalidRequestError("this deployment's model takes no prompt_embeds", "prompt_embeds")
        if len(embeds.shape) != 2 or embeds.shape[1] != self._hidden_size or embeds.dtype not in EMBEDS_DTYPES:
            raise InvalidRequestError(
                f"prompt_embeds are {embeds.dtype}{list(embeds.shape)}; this model's are [number of tokens, "
                f"{self._hidden_size}] of {', '.join(EMBEDS_DTYPES)}",
                "prompt_embeds",
            )
        if embeds.num_bytes * num_samples > MAX_EMBEDS_BYTES:
            raise InvalidRequestError(
                f"prompt_embeds times n have {embeds.num_bytes * num_samples} bytes; {MAX_EMBEDS_BYTES} are the limit",
                "prompt_embeds",
            )

    def check_vectors(self, dimensions: int | None) -> None:
        """Refuse, with ``InvalidRequestError``, vectors that the model cannot give."""
        if "pooling" not in self.features:
            raise InvalidRequestError("this deployment's model gives no embeddings", "model")
        if dimensions is not None and dimensions > self._hidden_size:
            raise InvalidRequestError(
                f"dimensions is {dimensions}; this model's embeddings have {self._hidden_size}", "dimensions"
            )

    def check_length(self, num_tokens: int, field: str) -> None:
        """Refuse, with ``InvalidRequestError``, a prompt that cannot be run whole. No room is needed behind it."""
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token", field)
        if num_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, but this model's context is {self.max_model_len} tokens", field
            )


class RuleEncoder:
    """Encodes bad words and grammars for one model."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._checker = GrammarChecker()

    async def encode(self, params: GenerationParams) -> EncodedRules:
        """Return what travels to the engines.

        Raises:
            InvalidRequestError: a bad word has no tokens, or the grammar is none; names the field.
        """
        if not params.bad_words and params.grammar is None:
            return EncodedRules()
        grammar = None if params.grammar is None else await self._checker.check(params.grammar)
        return EncodedRules(
            tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._tokens(word))), grammar
        )

    async def aclose(self) -> None:
        """Free what checks grammars; idempotent."""
        await self._checker.aclose()

    def _tokens(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokens of a word at the beginning of a text, and behind a space, where they mostly differ."""
        found = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())]
        if not all(found):
            raise InvalidRequestError("bad_words holds a text without tokens", "bad_words")
        return found


def check_features(params: GenerationParams, features: frozenset[str]) -> None:
    """Refuse what these engines cannot do, and what contradicts a grammar.

    Raises:
        InvalidRequestError: names the field.
    """
    wanted = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    field = next((name for name, number in wanted.items() if number is not None), None)
    if field is not None and "logprobs" not in features:
        raise InvalidRequestError(f"{field} is not available: this deployment's engines have no probabilities", field)
    if params.grammar is None:
        return
    field = params.grammar.field
    if "grammar" not in features:
        raise InvalidRequestError(f"{field} is not available: this deployment's engines cannot follow a grammar", field)
    if params.ignore_eos or params.min_tokens:
        other = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequestError(
            f"{other} cannot be combined with {field}: the grammar says where the output ends", other
        )


def check_scheduling(params: GenerationParams) -> None:
    """Refuse a priority or a salt that cannot travel; an engine must not be the first to notice.

    Raises:
        InvalidRequestError: names the field.
    """
    if not MIN_PRIORITY <= params.priority <= MAX_PRIORITY:
        raise InvalidRequestError("priority does not fit 64 bits", "priority")
    if params.cache_salt is None:
        return
    if not params.cache_salt:
        raise InvalidRequestError(
            "cache_salt is empty: leave it out, or give a text that cannot be guessed", "cache_salt"
        )
    try:
        params.cache_salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("cache_salt holds half a character (a lone surrogate)", "cache_salt") from error


def check_embeds_params(params: GenerationParams) -> None:
    """Refuse what a prompt of embeddings cannot have: it has no tokens, and so no text.

    Raises:
        InvalidRequestError: names the field.
    """
    field = "echo" if params.echo else "prompt_logprobs" if params.prompt_logprobs is not None else None
    if field is not None:
        raise InvalidRequestError(f"{field} cannot be combined with prompt_embeds: such a prompt has no tokens", field)
