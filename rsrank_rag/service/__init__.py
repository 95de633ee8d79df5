"""The HTTP service: one model for many applications.

A request goes through `middleware`, a route of `app`, the `scheduler` with its `work_queue`, and
the `engine` in the `model_process`. docs/architecture.md follows it ("A request to the service").
"""
