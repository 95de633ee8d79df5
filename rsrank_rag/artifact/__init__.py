"""The artifact: config, B, model card, and the identity of its language model."""
