"""The messages that travel between Shoal's processes. Pure data.

Structs are ``array_like``: fields are positions. The four rules of evolution: new fields go last, with a default;
a field is never removed, reordered or given another type. ``schema.lock.json`` beside this file holds the layout and a
test compares it. The READMEs of ``engine/wire``, ``client`` and ``lb`` describe what is sent when.

Durations travel between hosts, never wall-clock times. All ``*_s`` are seconds, all ``num_*`` are counts.
"""

from enum import IntEnum, StrEnum
from typing import Any

from msgspec import Struct

from engine.wire.control import ClusterSettings, Membership, MemberStatus
from engine.wire.errors import UnknownMethodError, UtilityErrorCode
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.logprobs import Logprobs
from engine.wire.replicas import ReplicaInfo, Suspect
from engine.wire.sampling import PoolingParams, SamplingParams
from engine.wire.states import EnginePhase
from engine.wire.tensors import Tensor

EEP_NOTIFICATION_CALL_ID = -1
"""Utility call id on which elastic expert-parallel notifications travel; no call ever draws it."""


class EEPNotification(StrEnum):
    """A notice of an elastic change, from an engine to its clients in a ``UtilityOutput``; for observers."""

    NEW_CORE_ENGINES_INIT_READY = "NEW_CORE_ENGINES_INIT_READY"  # the engine joins a running deployment
    NEW_CORE_ENGINES_WEIGHTS_INIT_READY = "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"  # and has its weights
    RECONFIGURE_FINISHED = "RECONFIGURE_FINISHED"  # it is a member of another group than before
    SHUTDOWN_COMPLETE = "SHUTDOWN_COMPLETE"  # it was asked to leave, and sends nothing more


# --- client -> engine: the request channel ----------------------------------------------------------------------------


class AddRequest(Struct, array_like=True, tag=1):
    """Start (or, with output tokens, resume) one sequence on one engine.

    client_id, channel_seq: stamped by the client when it sends; ``channel_seq`` counts this client's messages to this
        EngineId from 1, ADD, ABORT and UTILITY alike.
    request_id: from ``RequestIds``, the same for all samples of a request.
    sample_index: 0..n-1.
    attempt: 0 for the first engine that gets the sequence, +1 whenever it is moved or resumed.
    output_token_ids: tokens already produced by earlier attempts; the engine continues behind them.
    priority: lower runs earlier; equal priorities are first come, first served.
    cache_salt: the sequence shares cached blocks only with those of the same salt; None is a salt of its own.
    prompt_embeds: floats [num_prompt_tokens, hidden_size] that stand in for the embeddings of the prompt's tokens;
        ``prompt_token_ids`` then holds that many placeholders, 0. None takes the tokens.
    pooling: the sequence runs its prompt and ends with ``EngineCoreOutput.pooled``; None draws tokens.
    """

    client_id: ClientId
    channel_seq: int
    request_id: int
    sample_index: int
    attempt: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    prompt_embeds: Tensor | None = None
    pooling: PoolingParams | None = None


class AbortRequest(Struct, array_like=True, tag=2):
    """Free one sequence. An unknown sequence, or another attempt of it, is acknowledged alike (by ``applied``)."""

    client_id: ClientId
    channel_seq: int
    request_id: int
    sample_index: int
    attempt: int


class UtilityRequest(Struct, array_like=True, tag=3):
    """Call a registered method of the engine; answered by one ``UtilityOutput`` with the same ``call_id``."""

    client_id: ClientId
    channel_seq: int
    call_id: int
    method: str
    args: list[Any]


ChannelMessage = AddRequest | AbortRequest | UtilityRequest


# --- engine -> client, on the request channel -------------------------------------------------------------------------


class EngineReady(Struct, array_like=True, frozen=True):
    """The handshake, an engine's first message to each client: what the engine learned when it started.

    build_id, config_hash: must equal the client's, else the client refuses the engine by name.
    max_model_len: prompt + output tokens of one sequence at most.
    vocab_size: token ids are in [0, vocab_size).
    num_kv_tokens: tokens the KV cache holds.
    features: what this engine can do beside drawing tokens from tokens: ``logprobs``, ``grammar``, ``prompt_embeds``,
        ``pooling``.
    hidden_size: numbers of one embedding or pooled vector.
    channel_number: counts the channels that the engine has opened to this client, from 1; 0 is always a new one.
    config: the values that ``config_hash`` covers, see ``config_values``, so that a refusal can name what differs.

    Both channels, of requests and outputs, begin here: both sides count from 1 behind it. The same EngineReady is
    repeated until the client has sent something, because it may get lost too. One with a higher number begins new
    channels, and means that the engine dropped what it had of this client.
    """

    engine_id: EngineId
    build_id: str
    config_hash: str
    max_model_len: int
    vocab_size: int
    num_kv_tokens: int
    max_num_seqs: int
    device: str
    dtype: str
    node: str
    pid: int
    features: tuple[str, ...] = ()
    hidden_size: int = 0
    channel_number: int = 0
    config: dict[str, str] = {}


# --- engine -> client: the output channel -----------------------------------------------------------------------------


class FinishReason(IntEnum):
    """Why a sequence produced its last token. REROUTE alone is not terminal: the client picks another engine."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REROUTE = 4


class ErrorKind(IntEnum):
    """Whose fault the end of a sequence with ERROR is.

    ENGINE: something broke; the same request may do elsewhere. REQUEST: it cannot be served as it was asked, wherever.
    """

    ENGINE = 0
    REQUEST = 1


class EngineCoreOutput(Struct, array_like=True, gc=False):
    """New tokens of one sequence, or its end.

    first_position: number of output tokens of the sequence before ``new_token_ids`` (over all attempts).
    stop_token_id: the stop or end-of-sequence token that ended it, else None; it is not in ``new_token_ids``.
    error, error_kind: one sentence for the user when ``finish_reason`` is ERROR, and whose fault it is.
    queue_time_s: with the first tokens of an attempt, time from receipt to first being scheduled; else None.
    num_cached_tokens: with the first tokens of an attempt, prompt tokens served from the prefix cache.
    logprobs: of ``new_token_ids``, when asked for.
    prompt_logprobs: with the first tokens of an attempt, of all prompt tokens but the first, when asked for.
    pooled: float32 [hidden_size], with the end of a sequence that asked for a vector; it has no tokens.
    """

    request_id: int
    sample_index: int
    attempt: int
    first_position: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    queue_time_s: float | None = None
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error_kind: ErrorKind = ErrorKind.ENGINE
    pooled: Tensor | None = None


class UtilityOutput(Struct, array_like=True):
    """Answer to a ``UtilityRequest``, or a notification when ``call_id`` is ``EEP_NOTIFICATION_CALL_ID``.

    error: None on success; else one sentence for people, and ``result`` is None. error_code: what kind of failure.
    """

    call_id: int
    result: Any = None
    error: str | None = None
    error_code: UtilityErrorCode = UtilityErrorCode.FAILED

    @classmethod
    def of_error(cls, call_id: int, error: Exception) -> "UtilityOutput":
        """Return the answer to a call that raised."""
        if isinstance(error, UnknownMethodError):
            return cls(call_id, error=str(error), error_code=UtilityErrorCode.UNKNOWN_METHOD)
        return cls(call_id, error=f"{type(error).__name__}: {error}")


class EngineCoreOutputs(Struct, array_like=True):
    """One message per step per client.

    out_seq: counts the frames of this (engine, client) pair from 1.
    applied: last contiguous ``channel_seq`` of this client that the engine has applied.
    report_seq: number of the first EngineReport that reflects this step.
    dead: why the engine dies, in the last message that it sends; else None.
    """

    engine_id: EngineId
    client_id: ClientId
    out_seq: int
    applied: int
    report_seq: int
    outputs: list[EngineCoreOutput]
    utility_output: UtilityOutput | None = None
    dead: str | None = None


# --- everybody -> coordinator: the report channel ---------------------------------------------------------------------


class EngineReport(Struct, array_like=True, frozen=True, tag=1):
    """Whole state of one engine, numbered; the newest wins and loss or repetition needs no other rule.

    applied: client -> last contiguous ``channel_seq`` applied.
    detail, progress: what a LOADING engine is doing, and how far it is (0..1).
    settings_seq: number of the newest ``ClusterSettings`` that are in force here; a pause is in force once no step will
        run any more.
    is_sleeping: weights and cache are off the device.
    member: the part that only a rank of a lockstep group has; None for an independent one.
    is_draining: it takes nothing new, and ``load`` counts all that it still has.
    """

    engine_id: EngineId
    report_seq: int
    epoch: int
    ready_epoch: int
    max_epoch_seen: int
    wave: int
    phase: EnginePhase
    coll_seq: int
    has_work: bool
    applied: dict[ClientId, int]
    load: Load
    node: str = ""
    device: str = ""
    pid: int = 0
    detail: str = ""
    progress: float = 0.0
    settings_seq: int = 0
    is_sleeping: bool = False
    member: MemberStatus | None = None
    is_draining: bool = False


class ClientInfo(Struct, array_like=True, frozen=True):
    """Where the engines reach one client: its ROUTER for requests, its PULL for outputs (ZeroMQ endpoints)."""

    client_id: ClientId
    request_endpoint: str
    output_endpoint: str


class ClientReport(Struct, array_like=True, frozen=True, tag=2):
    """The sign of life of a client, with its endpoints. ``leaving`` takes it out of the group at once.

    wave_wanted: the client sent a request while the whole lockstep group was idle in the wave before this one, and asks
        that it be started. A shortcut of one hop before the idle engine's own report; nothing depends on it. 0: none.
    """

    report_seq: int
    info: ClientInfo
    leaving: bool = False
    wave_wanted: int = 0


class SupervisorReport(Struct, array_like=True, frozen=True, tag=3):
    """The desired state of the supervisor, and what its hosts have confirmed; whole and numbered like every report.

    replicas: every replica of the deployment. A DEAD replica is a death confirmed by its host.
    dismissed: engines that must exit.
    gone_clients: clients whose process the supervisor saw end.
    settings: as the operator set them.
    """

    report_seq: int
    replicas: list[ReplicaInfo]
    dismissed: list[EngineId]
    gone_clients: list[ClientId]
    settings: ClusterSettings = ClusterSettings()


Report = EngineReport | ClientReport | SupervisorReport


# --- coordinator -> everybody: the state channel ----------------------------------------------------------------------


class GroupState(Struct, array_like=True, frozen=True, tag=1):
    """Whole control state, published on change and repeated until every member's report shows it.

    generation, seq: of the coordinator process and of this message; the higher pair is newer.
    committed: the membership in force. proposal, direct: the one that is being prepared, if any, and the way it takes.
    dismissed: engines that must exit. wave_started: the newest wave of a lockstep group.
    clients, replicas, settings: of the whole deployment, as clients and supervisor reported them.
    suspects: engines without a sign of progress. Only the coordinator, which hears them all, judges that.
    """

    generation: int
    seq: int
    committed: Membership
    proposal: Membership | None
    direct: bool
    dismissed: list[EngineId]
    wave_started: int
    clients: list[ClientInfo]
    replicas: list[ReplicaInfo]
    settings: ClusterSettings = ClusterSettings()
    suspects: list[Suspect] = []


class LoadSnapshot(Struct, array_like=True, frozen=True, tag=2):
    """Each engine's last report, verbatim; the coordinator adds nothing up."""

    generation: int
    seq: int
    reports: list[EngineReport]


StateMessage = GroupState | LoadSnapshot

GROUP_TOPIC = b"G"
"""First frame of a GroupState: engines, clients and the supervisor subscribe to it."""

LOAD_TOPIC = b"L"
"""First frame of a LoadSnapshot: clients and the supervisor subscribe to it."""
