"""What Ray says about a dead actor, in one line. Plain exceptions: no Ray is started."""

from ray.exceptions import RayError

from orchestrator.launch.ray_host import describe_ray_error

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tpid: 11189
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer."""


def test_the_last_line_is_the_reason_without_its_guesses() -> None:
    assert describe_ray_error(RayError(DIED)) == (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file."
    )


def test_an_error_without_words_is_its_name() -> None:
    assert describe_ray_error(RayError()) == "RayError"
