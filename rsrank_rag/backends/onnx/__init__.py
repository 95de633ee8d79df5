"""Encoders of BERT's kind on ONNX Runtime, without torch."""
