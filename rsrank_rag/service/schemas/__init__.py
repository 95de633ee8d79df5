"""API schemas: pure functions from requests to pairs, and from scores to answers.

Unknown fields are ignored, because every client library sends some of its own. A known field of the
wrong type is an error.
"""
