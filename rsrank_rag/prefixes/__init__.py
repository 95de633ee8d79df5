"""The prefix cache: documents' keys and values between calls."""
