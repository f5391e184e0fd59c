"""The requests this process is answering, by the names their callers know."""

from collections.abc import Iterable

from orchestrator.llm.stream import RequestStream


class OpenRequests:
    """Finds streams by x-request-id or by the id of the reply. Callers may use one x-request-id for many requests."""

    def __init__(self) -> None:
        self._by_request_id: dict[str, dict[RequestStream, None]] = {}
        self._by_response_id: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._by_response_id)

    def add(self, request_id: str, response_id: str, stream: RequestStream) -> None:
        """Take a request in; reply ids are drawn here and unique."""
        self._by_request_id.setdefault(request_id, {})[stream] = None
        self._by_response_id[response_id] = stream

    def remove(self, request_id: str, response_id: str, stream: RequestStream) -> None:
        """Forget a request that was added."""
        streams = self._by_request_id[request_id]
        del streams[stream]
        if not streams:
            del self._by_request_id[request_id]
        del self._by_response_id[response_id]

    def find(self, names: Iterable[str] | None) -> dict[str, list[RequestStream]]:
        """Return the streams of each of these names that is known; None means every request, by the reply's id."""
        if names is None:
            return {response_id: [stream] for response_id, stream in self._by_response_id.items()}
        return {name: streams for name in names if (streams := self._of(name))}

    def _of(self, name: str) -> list[RequestStream]:
        builder = self._by_response_id.get(name)
        return list(self._by_request_id.get(name, ())) if builder is None else [builder]
