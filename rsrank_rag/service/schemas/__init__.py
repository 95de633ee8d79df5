"""API schemas: requests become pairs, and scores become answers.

All clients send the same request with other names. Unknown fields are ignored, because every client
library sends some of its own. A known field of the wrong type is an error.
"""
