"""The systems that can be compared, by name."""
