"""The Python side of tensor, pipeline and sequence parallelism."""
