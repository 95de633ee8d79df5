"""What is shared: config, B, model card, and the identity of the language model they belong to."""
