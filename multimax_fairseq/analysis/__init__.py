"""What a trained model has learned, read from its checkpoints."""
