"""What of a request's rules depends on the model: texts become tokens, grammars are checked, requests refused."""

from engine.wire.errors import InvalidRequestError
from orchestrator.llm.grammar_checker import GrammarChecker
from orchestrator.llm.params import EncodedRules, GenerationParams
from orchestrator.llm.tokenizer import TextTokenizer


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


def check_embeds_params(params: GenerationParams) -> None:
    """Refuse what a prompt of embeddings cannot have: it has no tokens, and so no text.

    Raises:
        InvalidRequestError: names the field.
    """
    field = "echo" if params.echo else "prompt_logprobs" if params.prompt_logprobs is not None else None
    if field is not None:
        raise InvalidRequestError(f"{field} cannot be combined with prompt_embeds: such a prompt has no tokens", field)
