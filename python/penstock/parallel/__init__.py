"""What tensor, pipeline and sequence ranks do to a model in Python."""
