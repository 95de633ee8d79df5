"""Frozen language models: the interface, and one on torch and one on ONNX Runtime."""
