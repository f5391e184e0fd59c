"""What a model can take and give besides tokens, found by trying: families differ in more than their signatures."""

from dataclasses import dataclass
from typing import Any

import torch

from engine.model.loader import LoadedModel
from engine.runner.pooling import watched
from engine.runner.probe import run_one_token


@dataclass(frozen=True, slots=True)
class Abilities:
    """hidden_size: numbers of an embedding and of a final hidden state.

    takes_embeds: embeddings may stand in for tokens. shows_states: the final hidden states can be seen.
    """

    hidden_size: int
    takes_embeds: bool
    shows_states: bool

    @property
    def features(self) -> set[str]:
        """Return what to say of them in ``EngineReady.features``."""
        known = {"prompt_embeds": self.takes_embeds, "pooling": self.shows_states}
        return {name for name, is_there in known.items() if is_there}


def find_abilities(loaded: LoadedModel) -> Abilities:
    """Run a token by its id and by its embedding, and see whether the model answers alike."""
    model = loaded.model
    zero = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
    with torch.inference_mode():
        embeds: torch.Tensor = model.get_input_embeddings()(zero)
    with watched(model) as seen:
        expected = run_one_token(model, loaded.device, input_ids=zero)
    hidden_size = embeds.shape[-1]
    return Abilities(
        hidden_size=hidden_size,
        takes_embeds=_answers_alike(model, loaded.device, embeds, expected),
        shows_states=model.base_model is not model and seen.states is not None and seen.states.shape[-1] == hidden_size,
    )


def _answers_alike(model: Any, device: torch.device, embeds: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        answer = run_one_token(model, device, inputs_embeds=embeds)
    except (TypeError, ValueError, RuntimeError):  # it insists on ids, each family in its own words
        return False
    return torch.allclose(answer, expected)
