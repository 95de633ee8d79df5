"""The exceptions that the Hugging Face Hub's client raises."""

from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

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
