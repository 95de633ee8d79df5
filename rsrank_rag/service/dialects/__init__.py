"""What clients send and what they are answered, one family of clients a module.

A `ScoringRequest` gives a `Question` (the pairs to score) and, once there are outcomes, its answer: both are pure
functions. Fields that nobody here knows are ignored, because every client library sends some of its own; a known field
of the wrong type is an error.
"""

from .common import normalise

__all__ = ["normalise"]
