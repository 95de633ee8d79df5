"""Scored documents, and which of them are kept."""
