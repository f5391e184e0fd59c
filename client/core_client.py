"""The interface of every client of an engine, whatever lies between them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from client.mailbox import OutputHandler
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, EngineCoreOutputs
from lb.views.engine_view import EngineView


class EngineCoreClient(ABC):
    """Add, abort, outputs, utility call, close."""

    @abstractmethod
    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """Send one sequence to an engine and return which; its outputs come through ``get_output_async``.

        Raises:
            InvalidRequestError: no such rank; names the ranks there are.
            OverloadedError: no engine can take it now.
            EngineDeadError: this client is closed, or has lost its engines.
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
    async def consume_outputs(self, handler: OutputHandler) -> None:
        """Let ``handler`` have every batch from where it arrives, in place of ``get_output_async``; returns never.

        Raises:
            EngineDeadError: nothing more will come. Whatever ``handler`` raised: it gets no batch any more.
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


class GroupClient(Protocol):
    """What the text facade needs: a client that picks among several engines and can abort one sample alone."""

    client_id: ClientId
    request_ids: RequestIds

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        """See ``EngineCoreClient``."""

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """See ``EngineCoreClient``; with ``sample_index`` this sample of each alone."""

    async def get_output_async(self) -> EngineCoreOutputs:
        """See ``EngineCoreClient``."""

    async def consume_outputs(self, handler: OutputHandler) -> None:
        """See ``EngineCoreClient``."""

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
