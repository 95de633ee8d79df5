"""B on frozen Qwen decoders: weights, features, training, results."""
