"""What the Hugging Face Hub's client raises, and how soon."""

from functools import cache
from typing import Any

from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled

HUB_ERRORS: tuple[type[Exception], ...] = (
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
    OSError,
    ValueError,
    RuntimeError,
    EntryNotFoundError,
)
"""Every HTTP error (from httpx or httpx2, so the class is reached through a child of it), OSError (also from Xet),
ValueError (an answer that is no JSON, such as a login page; a refused model card), RuntimeError (an upload that failed
in a thread) and EntryNotFoundError."""

PATIENCE = 4.0  # seconds to wait for the first connection


@cache
def say_at_once_that_there_is_no_hub() -> None:
    """Have this process fall back to the cache when its first request finds no Hub: the client tries for 90 seconds.

    Once the Hub has answered, what fails is tried again as ever.
    """
    usual = get_session()
    kind: Any = type(usual)

    class Client(kind):  # type: ignore[misc] # of httpx or httpx2
        answered = False

        def send(self, request: Any, **options: Any) -> Any:
            if Client.answered:
                return super().send(request, **options)
            waiting = request.extensions["timeout"]
            waiting["connect"] = min(waiting["connect"] or PATIENCE, PATIENCE)
            try:
                answer = super().send(request, **options)
            except HUB_ERRORS[0] as error:
                raise OfflineModeIsEnabled(
                    f"{request.url.host} cannot be reached ({error})."
                ) from error
            Client.answered = True
            return answer

    set_client_factory(
        lambda: Client(event_hooks=usual.event_hooks, follow_redirects=True, timeout=None)
    )
