"""Rules about texts that every part of the package shares."""

import re

# English has about 4.5 characters a token. For costs that are estimated without a tokenizer.
CHARACTERS_PER_TOKEN = 4


def encodable(text: str) -> str:
    r"""A text of the same length, with U+FFFD for each half of a surrogate pair.

    JSON can spell such halves, and neither an encoding nor a tokenizer takes them.

    >>> encodable("a\ud83d")
    'a�'
    """
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)
