"""The exceptions that the Hugging Face Hub's client raises."""

from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

# Every HTTP error (the base class is httpx's or httpx2's, so that it is taken from a child of it),
# OSError (also from Xet), ValueError (an answer that is no JSON, such as a login page; a refused
# model card), RuntimeError (an upload that failed in a thread) and EntryNotFoundError.
HUB_ERRORS: tuple[type[Exception], ...] = (
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
    OSError,
    ValueError,
    RuntimeError,
    EntryNotFoundError,
)
