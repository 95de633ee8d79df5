"""The same contract, answered by a service."""
