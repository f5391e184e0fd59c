"""What every client of an engine can do, whatever lies between them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.wire.ids import EngineId
from engine.wire.messages import AddRequest, EngineCoreOutputs


class EngineCoreClient(ABC):
    """Add, abort, outputs, utility call, close."""

    @abstractmethod
    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Send one sequence to an engine and return which; its answer comes through ``get_output_async``.

        Raises:
            InvalidRequestError: no such rank; names the ranks there are.
            OverloadedError: no engine can take it now.
            EngineDeadError: this client's line is closed.
        """

    @abstractmethod
    async def abort_requests_async(self, request_ids: Sequence[int]) -> None:
        """Ask for the end of requests, all samples of each. An unknown id is a no-op."""

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next batch of outputs of one engine.

        Raises:
            EngineDeadError: nothing more will come; raised again by every later call.
        """

    @abstractmethod
    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a registered method of the engine and return its result.

        Raises:
            UtilityError: the method raised. EngineDeadError: no answer will come.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close everything; idempotent. Calls that still wait get ``EngineDeadError``."""
