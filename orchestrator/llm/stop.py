"""Stop strings in streamed text: nothing behind one ever gets out, and nothing that may be the start of one."""

from collections.abc import Sequence


class StopChecker:
    """Watches the text of one stream for the first stop string.

    The first is the one that is complete first; of several complete at the same character, the longest. So the result
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Watch for any of these non-empty strings; the match itself is part of the output only on request."""
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops))
        self._starts = {stop[0] for stop in self._stops}
        self._held = ""  # text that may be the start of a stop string: shorter than the longest one

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text that may go out, whether a stop string was found). After a match, feed no more."""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            start, end = match
            return buffer[: end if self._include else start], True
        keep = self._held_from(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """Return what was held back; call it once, when the stream ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        first: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                end = start + len(stop)
                if first is None or (end, start) < (first[1], first[0]):
                    first = start, end
        return first

    def _held_from(self, buffer: str) -> int:
        """Return where the longest end of the buffer that begins a stop string starts."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._starts and any(stop.startswith(buffer[start:]) for stop in self._stops):
                return start
        return len(buffer)
