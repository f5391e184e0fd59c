"""What each rank tells the others at the beginning of a step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.parallel.transport import Transport, all_to_all


class StepHeader(NamedTuple):
    """One rank's word on the step all are about to take.

    epoch, wave, step: where it stands; joiners adopt the highest. num_tokens: rows it brings into the step.
    has_work: it has sequences that can run, read after its inbox was drained. committed_epoch: the newest committed
    epoch that it has seen and is ready for. paused: it has seen the pause and would rather stop (0 or 1). asleep: its
    experts are in no memory (0 or 1).
    """

    epoch: int
    wave: int
    step: int
    num_tokens: int
    has_work: int
    committed_epoch: int
    paused: int
    asleep: int = 0


def exchange_headers(transport: Transport, header: StepHeader) -> list[StepHeader]:
    """Tell every member, and return everybody's header in the order of the members.

    Raises:
        GroupBrokenError: see ``Transport``.
    """
    num = transport.num_members
    mine = torch.tensor([header] * num, dtype=torch.int64)
    everybody: Sequence[Sequence[int]] = all_to_all(transport, mine, [1] * num, [1] * num).tolist()
    return [StepHeader(*row) for row in everybody]
