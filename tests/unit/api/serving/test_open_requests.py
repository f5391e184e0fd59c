"""Requests by either of their names."""

from orchestrator.api.serving.admission import OpenRequests
from orchestrator.llm.stream import RequestStream


def stream() -> RequestStream:
    return RequestStream([], 0.0)


def test_a_request_is_found_by_either_name_until_it_is_removed() -> None:
    requests, first, second = OpenRequests(), stream(), stream()
    requests.add("mine", "cmpl-1", first)
    requests.add("mine", "cmpl-2", second)
    assert requests.find(["mine", "cmpl-2", "other"]) == {"mine": [first, second], "cmpl-2": [second]}
    requests.remove("mine", "cmpl-1", first)
    assert requests.find(["mine", "cmpl-1"]) == {"mine": [second]}
    requests.remove("mine", "cmpl-2", second)
    assert requests.find(None) == {}
    assert requests.find(["mine"]) == {}


def test_no_names_mean_every_request_once() -> None:
    requests, first, second = OpenRequests(), stream(), stream()
    requests.add("mine", "cmpl-1", first)
    requests.add("mine", "cmpl-2", second)
    assert requests.find(None) == {"cmpl-1": [first], "cmpl-2": [second]}
