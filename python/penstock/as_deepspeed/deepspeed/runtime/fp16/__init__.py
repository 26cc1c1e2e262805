"""Loss scalers and optimizer classes of fp16."""
