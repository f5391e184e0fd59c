"""One API process before real engines (sim), over loopback: what callers see."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from bench.local_deployment import MODEL_NAME, LocalDeployment, local_deployment
from engine.config.engine_config import SimConfig

MAX_MODEL_LEN = 2048
MAX_PENDING = 64
FAILING_TOKEN = 1
DEADLINE_S = 30.0
MESSAGES: Any = [{"role": "user", "content": "How many fish are in a shoal?"}]
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 24, "seed": 7}
LONG = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 1500}


@pytest.fixture(scope="module")
def deployment() -> Iterator[LocalDeployment]:
    sim = SimConfig(step_s=0.004, max_model_len=MAX_MODEL_LEN, fail_on_token=FAILING_TOKEN)
    with local_deployment(2, sim, max_pending_requests=MAX_PENDING) as running:
        yield running


@pytest.fixture
def http(deployment: LocalDeployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.url, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


@pytest.fixture
def client(deployment: LocalDeployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)


def is_idle(http: httpx.Client) -> bool:
    cluster = http.get("/v1/cluster").json()
    return not cluster["pending_requests"] and not any(
        rank["running"] + rank["waiting"] + rank["in_flight"] for rank in cluster["ranks"]
    )


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=12)
    (choice,) = answer.choices
    assert len(choice.message.content or "") == 12  # a token of the sim engine is a letter
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=40, seed=3)
    chunks = list(
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=40, seed=3, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_with_the_stream_when_asked_for(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5


def test_n_choices_are_all_answered_and_differ(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=16, n=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert len({choice.message.content for choice in answer.choices}) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 80


def test_n_choices_stream_side_by_side_and_end_once_each(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=16, n=3, stream=True))
    ends = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


def test_a_seed_repeats_and_no_seed_does_not(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        answer = client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=24, seed=seed)
        return answer.choices[0].text

    assert text(5) == text(5)
    assert text(None) != text(None)


def test_many_prompts_with_many_samples_keep_their_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=["a", "b"], max_tokens=8, n=2, seed=1)
    alone = client.completions.create(model=MODEL_NAME, prompt="b", max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]


def test_token_ids_are_a_prompt_too(client: openai.OpenAI) -> None:
    as_text = client.completions.create(model=MODEL_NAME, prompt="ab", max_tokens=8, seed=1)
    as_ids = client.completions.create(model=MODEL_NAME, prompt=list(b"ab"), max_tokens=8, seed=1)
    assert as_text.choices[0].text == as_ids.choices[0].text


def test_a_completion_has_16_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    assert len(client.completions.create(model=MODEL_NAME, prompt="a").choices[0].text) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_exactly_and_frees_the_engine(
    client: openai.OpenAI, http: httpx.Client, stream: bool
) -> None:
    def text(**options: Any) -> tuple[str, str]:
        common: dict[str, Any] = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 1500, "seed": 11}
        if not stream:
            (choice,) = client.completions.create(**common, **options).choices
            return choice.text, choice.finish_reason
        chunks = list(client.completions.create(**common, **options, stream=True))
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason

    whole = client.completions.create(model=MODEL_NAME, prompt="abc", max_tokens=60, seed=11).choices[0].text
    stop = whole[30:34]
    cut = whole.index(stop)
    assert text(stop=stop) == (whole[:cut], "stop")
    assert text(stop=[stop, "@"], extra_body={"include_stop_str_in_output": True}) == (whole[: cut + 4], "stop")
    eventually(lambda: is_idle(http))


def test_one_sample_that_stops_leaves_its_sibling_alone(client: openai.OpenAI) -> None:
    both = client.completions.create(model=MODEL_NAME, prompt="q", max_tokens=80, n=2, seed=2).choices
    stop = next(both[0].text[at : at + 3] for at in range(40) if both[0].text[at : at + 3] not in both[1].text)
    cut = client.completions.create(model=MODEL_NAME, prompt="q", max_tokens=80, n=2, seed=2, stop=stop).choices
    assert [choice.finish_reason for choice in cut] == ["stop", "length"]
    assert cut[0].text == both[0].text[: both[0].text.index(stop)]
    assert cut[1].text == both[1].text


def test_long_text_is_tokenised_off_the_loop_to_the_same_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt="x" * 2001, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2001


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param", "hint"),
    [
        ({"n": 129}, 400, "n", "128"),
        ({"max_tokens": "ten"}, 400, "max_tokens", "integer"),
        ({"temperature": 3}, 400, "temperature", "2"),
        ({"fishes": 3}, 400, "fishes", "fishes"),
        ({"frequency_penalty": 3}, 400, "frequency_penalty", "2"),
        ({"logprobs": True}, 400, "logprobs", "not available"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not available"),
        ({"logit_bias": {"256": 1}}, 400, "logit_bias", "256"),
        ({"model": "gpt-7"}, 404, "model", "gpt-7"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages", str(MAX_MODEL_LEN)),
        ({"max_tokens": MAX_MODEL_LEN}, 400, "max_tokens", str(MAX_MODEL_LEN)),
        ({"data_parallel_rank": 9}, 400, "data_parallel_rank", "0, 1"),
        ({"stop_token_ids": [256]}, 400, "stop_token_ids", "256"),
    ],
)
def test_what_cannot_be_served_names_field_and_limit(
    http: httpx.Client, fields: dict[str, Any], status: int, param: str, hint: str
) -> None:
    answer = http.post(CHAT_PATH, json=CHAT | fields)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert hint in error["message"]


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-7", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="128"):
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, n=1000)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT_PATH, content=body)
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT_PATH, 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v2/models", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_wrong_roads_are_answered_in_the_same_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    if status == 405:
        assert answer.headers["allow"]


def test_a_body_without_end_is_refused(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1024 * 1024

    answer = http.post(CHAT_PATH, content=endless())
    assert answer.status_code == 413
    assert "33554432" in error_of(answer)["message"]


def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenised(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "a" * 2_000_000})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "prompt"
    assert "2000000 characters" in error_of(answer)["message"]


def test_an_answer_does_not_send_back_whatever_was_sent(http: httpx.Client) -> None:
    answer = http.post(CHAT_PATH, json=CHAT | {"model": "m" * 100_000})
    assert answer.status_code == 404
    assert len(answer.content) < 2_000


def test_callers_that_never_finish_their_request_keep_nobody_out(deployment: LocalDeployment) -> None:
    host, port = deployment.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as connections:
        for _ in range(MAX_PENDING + 1):
            connection = connections.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode())
        assert httpx.post(f"{deployment.url}{CHAT_PATH}", json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_request_is_its_own(http: httpx.Client, stream: bool) -> None:
    body = {"model": MODEL_NAME, "prompt": [FAILING_TOKEN], "stream": stream}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "server_error"
    assert http.post(CHAT_PATH, json=CHAT).status_code == 200


# --- the caller goes away -------------------------------------------------------------------------------------------


def test_a_caller_that_leaves_a_stream_frees_its_slot(http: httpx.Client) -> None:
    with http.stream("POST", CHAT_PATH, json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())
        assert not is_idle(http)
    eventually(lambda: is_idle(http))


def test_a_caller_that_does_not_wait_for_a_whole_answer_frees_its_slot(
    http: httpx.Client, deployment: LocalDeployment
) -> None:
    hang_up_when(deployment, CHAT_PATH, LONG | {"n": 3}, lambda: num_running(http) == 3)
    eventually(lambda: is_idle(http))


def test_a_caller_that_does_not_wait_for_embeddings_frees_their_slots(
    http: httpx.Client, deployment: LocalDeployment
) -> None:
    body = {"model": MODEL_NAME, "input": ["x" * MAX_MODEL_LEN] * 500}  # half a minute's work
    hang_up_when(deployment, "/v1/embeddings", body, lambda: num_running(http) > 0)
    eventually(lambda: is_idle(http))


def num_running(http: httpx.Client) -> int:
    return sum(rank["running"] for rank in http.get("/v1/cluster").json()["ranks"])


def hang_up_when(deployment: LocalDeployment, path: str, body: Any, condition: Callable[[], bool]) -> None:
    """Send a request, and close the connection as soon as the condition holds."""
    host, port = deployment.url.removeprefix("http://").split(":")
    request = httpx.Request("POST", f"{deployment.url}{path}", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        eventually(condition)


# --- ranks, headers, state ------------------------------------------------------------------------------------------


def test_an_explicit_rank_gets_the_request(http: httpx.Client) -> None:
    def picks() -> list[int]:
        return [rank["picks"] for rank in http.get("/v1/cluster").json()["ranks"]]

    before = picks()
    for _ in range(3):
        http.post(CHAT_PATH, json=CHAT, headers={"x-data-parallel-rank": "1"}).raise_for_status()
    http.post(CHAT_PATH, json=CHAT | {"data_parallel_rank": 1}).raise_for_status()
    assert picks() == [before[0], before[1] + 4]


@pytest.mark.parametrize(
    ("header", "body"),
    [("one", {}), ("-1", {}), ("7", {}), ("9" * 5000, {}), ("0", {"data_parallel_rank": 1}), ("", {})],
)
def test_an_explicit_rank_that_makes_no_sense_is_refused(http: httpx.Client, header: str, body: dict[str, int]) -> None:
    answer = http.post(CHAT_PATH, json=CHAT | body, headers={"x-data-parallel-rank": header})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "data_parallel_rank"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 0}])
def test_the_callers_request_id_comes_back(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post(CHAT_PATH, json=CHAT | fields, headers={"x-request-id": "trace-42"})
    assert answer.headers["x-request-id"] == "trace-42"


def test_a_request_id_that_could_do_harm_is_replaced(http: httpx.Client) -> None:
    answer = http.post(CHAT_PATH, json=CHAT, headers={"x-request-id": "a b" * 100})
    assert answer.headers["x-request-id"].startswith("req-")


def test_one_connection_carries_many_requests(http: httpx.Client) -> None:
    for stream in (False, True, False, True):
        assert http.post(CHAT_PATH, json=CHAT | {"stream": stream}).status_code == 200


def test_state_is_told_to_people_and_probes(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json()["ready_ranks"] == 2
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert http.get(f"/v1/models/{MODEL_NAME}").json()["id"] == MODEL_NAME
    assert http.get("/version").json()["version"]
    ranks = http.get("/v1/cluster").json()["ranks"]
    assert [(rank["engine_id"], rank["state"], rank["device"]) for rank in ranks] == [
        ("0.1", "ready", "sim"),
        ("1.1", "ready", "sim"),
    ]
    assert all(rank["pid"] for rank in ranks)


def test_metrics_count_what_was_served(http: httpx.Client) -> None:
    http.post(CHAT_PATH, json=CHAT).raise_for_status()
    http.post(CHAT_PATH, json=CHAT | {"n": 0})
    text = http.get("/metrics").text
    for family in ("shoal_generation_tokens_total", "shoal_time_to_first_token_seconds_bucket", "shoal_engine_up"):
        assert f'{family}{{engine="0"' in text
        assert f'{family}{{engine="1"' in text
    assert "loop_lag" in text


def test_the_process_stays_small_and_knows_neither_torch_nor_ray(deployment: LocalDeployment) -> None:
    process = psutil.Process(deployment.api.pid)
    assert process.memory_info().rss < 200e6
    mapped = [entry.path for entry in process.memory_maps()]
    assert not [path for path in mapped if "/torch/" in path or "/ray/" in path]
