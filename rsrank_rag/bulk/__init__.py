"""Many pairs: files in, files out, on one machine or on many."""
