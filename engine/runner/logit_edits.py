"""Edits of single logits of a batch: collected row by row on the host, applied in a few calls on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


@dataclass(slots=True)
class _Changes:
    """Positions in the flattened logits, each at most once, and a number for each."""

    positions: list[TokenIds] = field(default_factory=list)
    numbers: list[NDArray[np.float32]] = field(default_factory=list)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return _to_device(self.positions, device), _to_device(self.numbers, device)


class LogitEdits:
    """The edits of one step, in the order in which they are applied.

    Division and shifts come first and bans last, so that nothing brings back what is forbidden.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._divisors = _Changes()
        self._penalties = _Changes()
        self._biases = _Changes()
        self._restricted: list[int] = []
        self._allowed: list[TokenIds] = []
        self._forbidden: list[TokenIds] = []

    def divide(self, row: int, ids: TokenIds, divisor: float) -> None:
        """Weaken tokens: divide logits above zero, multiply the others."""
        self._divisors.positions.append(self._positions(row, ids))
        self._divisors.numbers.append(np.full(len(ids), divisor, dtype=np.float32))

    def penalise(self, row: int, ids: TokenIds, penalties: NDArray[np.float32]) -> None:
        """Subtract a number from each logit."""
        self._penalties.positions.append(self._positions(row, ids))
        self._penalties.numbers.append(-penalties)

    def bias(self, row: int, ids: TokenIds, biases: NDArray[np.float32]) -> None:
        """Add a number to each logit."""
        self._biases.positions.append(self._positions(row, ids))
        self._biases.numbers.append(biases)

    def allow_only(self, row: int, ids: TokenIds) -> None:
        """Forbid every other token."""
        self._restricted.append(row)
        self._allowed.append(self._positions(row, ids))

    def forbid(self, row: int, ids: TokenIds) -> None:
        """Forbid tokens."""
        self._forbidden.append(self._positions(row, ids))

    def apply(self, logits: torch.Tensor) -> None:
        """Change float32 ``logits`` [R, vocabulary], which must be contiguous, in place."""
        flat, device = logits.view(-1), logits.device
        if self._divisors.positions:
            positions, divisors = self._divisors.on(device)
            values = flat[positions]
            flat[positions] = torch.where(values > 0, values / divisors, values * divisors)
        # Penalties and biases may concern the same token, and an indexed addition counts a position once.
        for shifts in (self._penalties, self._biases):
            if shifts.positions:
                positions, numbers = shifts.on(device)
                flat[positions] = flat[positions] + numbers
        if self._restricted:
            positions = _to_device(self._allowed, device)
            values = flat[positions]
            logits[torch.tensor(self._restricted, device=device)] = -torch.inf
            flat[positions] = values
        if self._forbidden:
            flat[_to_device(self._forbidden, device)] = -torch.inf

    def _positions(self, row: int, ids: TokenIds) -> TokenIds:
        return ids + row * self._vocab_size


def _to_device(parts: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.concatenate(parts))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
