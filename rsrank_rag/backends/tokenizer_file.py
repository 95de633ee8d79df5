"""The file of a tokenizer, before a tokenizer is built from it."""

import json
from pathlib import Path

from ..errors import ArtifactError

# A larger file would fill the memory.
LARGEST_FILE = 200_000_000

# A tokenizer takes memory for every id up to the largest one.
LARGEST_ID = 10_000_000


def largest_id(path: Path) -> int:
    """The largest token id in a ``tokenizer.json``.

    Raises:
        ArtifactError: The file cannot be read, or it or the largest id is too large.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content["added_tokens"]]
        largest = int(max([*ids, *added]))
        if largest > LARGEST_ID:
            raise ValueError(f"it has the token id {largest}, which would fill the memory")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is no tokenizer that can be used ({type(error).__name__}: {error}). "
            "Download it again."
        ) from error
    return largest
