"""Changes to single scores of a batch: collected row by row on the host, applied in a few calls on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(slots=True)
class _Changes:
    """Positions in the flattened scores, each at most once, and a number for each."""

    places: list[Ids] = field(default_factory=list)
    numbers: list[NDArray[np.float32]] = field(default_factory=list)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as tensors."""
        return _to_device(self.places, device), _to_device(self.numbers, device)


class LogitEdits:
    """The changes of one step, in the order in which they are applied.

    Division and shifts come first and bans last, so that nothing brings back what is forbidden.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._divisors = _Changes()
        self._penalties = _Changes()
        self._biases = _Changes()
        self._restricted: list[int] = []
        self._allowed: list[Ids] = []
        self._forbidden: list[Ids] = []

    def divide(self, row: int, ids: Ids, divisor: float) -> None:
        """Make scores weaker: divide those above zero, multiply the others."""
        self._divisors.places.append(self._places(row, ids))
        self._divisors.numbers.append(np.full(len(ids), divisor, dtype=np.float32))

    def penalise(self, row: int, ids: Ids, penalties: NDArray[np.float32]) -> None:
        """Take a number from each score."""
        self._penalties.places.append(self._places(row, ids))
        self._penalties.numbers.append(-penalties)

    def bias(self, row: int, ids: Ids, biases: NDArray[np.float32]) -> None:
        """Add a number to each score."""
        self._biases.places.append(self._places(row, ids))
        self._biases.numbers.append(biases)

    def allow_only(self, row: int, ids: Ids) -> None:
        """Forbid every other token."""
        self._restricted.append(row)
        self._allowed.append(self._places(row, ids))

    def forbid(self, row: int, ids: Ids) -> None:
        """Forbid tokens."""
        self._forbidden.append(self._places(row, ids))

    def apply(self, logits: torch.Tensor) -> None:
        """Change float32 ``logits`` [R, vocabulary], which must be contiguous, in place."""
        flat, device = logits.view(-1), logits.device
        if self._divisors.places:
            places, divisors = self._divisors.on(device)
            scores = flat[places]
            flat[places] = torch.where(scores > 0, scores / divisors, scores * divisors)
        for shifts in (self._penalties, self._biases):
            if shifts.places:
                places, numbers = shifts.on(device)
                flat[places] = flat[places] + numbers
        if self._restricted:
            places = _to_device(self._allowed, device)
            scores = flat[places]
            logits[torch.tensor(self._restricted, device=device)] = -torch.inf
            flat[places] = scores
        if self._forbidden:
            flat[_to_device(self._forbidden, device)] = -torch.inf

    def _places(self, row: int, ids: Ids) -> Ids:
        return ids + row * self._vocab_size


def _to_device(parts: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.concatenate(parts))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
