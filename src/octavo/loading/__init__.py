"""Finding a model's files, reading them, and filling weights from them. Nothing here computes with a model."""
