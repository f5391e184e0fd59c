"""The client that balances load: every sequence goes to the least loaded engine, and every accepted one ends once."""

from collections.abc import Mapping, Sequence
from typing import Any

from client.dp_async_mp_client import DPAsyncMPClient
from client.routing import BalancedRouting
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutputs


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Picks an engine per sequence, calls all engines at once, and moves the sequences of engines that died.

    What decides is in the ``Dispatcher``, what happens around it in ``BalancedRouting``.
    """

    _routing: BalancedRouting

    def process_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Let the dispatcher see a batch before the consumer does."""
        self._routing.dispatcher.on_outputs(outputs)

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        """Abort requests, all samples of each. Repeated until the engines have applied it; unknown ids are no-ops.

        sample_index: abort this sample alone: a stop string, which engines do not know, ends one and not its siblings.
        """
        self._ensure_open()
        self._routing.abort(request_ids, sample_index)

    def migrate_from(self, engine_id: EngineId, reason: str) -> None:
        """Move what an engine has to the others, though it lives; for who frees it without waiting for its streams.

        An engine that is unknown has nothing. Take it out of the candidates first (cordon it, or let it leave).
        """
        self._routing.migrate_from(engine_id, reason)

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result.

        Raises:
            UtilityError: it failed on some ranks; holds their reasons and the others' results.
            EngineDeadError: no engine is there.
        """
        return await self.call_ranks_async(method, args)

    async def call_ranks_async(
        self,
        method: str,
        args: Sequence[Any] = (),
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Call a method of every engine as ``call_utility_async`` does, and wait so long at most for each answer."""
        self._ensure_open()
        return await self._results.calls.call_ranks(self._engines.connections, method, args, timeout_s)

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels to the engines; the caller may add its own
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of every engine; return the results in the order of the ranks."""
        call = (method, timeout, list(args), dict(kwargs or {}))
        results = await self.call_ranks_async("collective_rpc", call)
        return [results[rank] for rank in sorted(results)]

    def _make_routing(self) -> BalancedRouting:
        parts = self.client_id, self._engines, self._sender, self._results, self._counts
        return BalancedRouting(*parts, self._config.migrations)
