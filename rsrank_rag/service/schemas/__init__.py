"""What clients send and what they are answered: pure functions from requests to questions, from scores to answers.

Fields that nobody here knows are ignored, because every client library sends some of its own; a known field of the
wrong type is an error.
"""

from .common import normalise

__all__ = ["normalise"]
