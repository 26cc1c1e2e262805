"""DeepSpeed's sequence parallelism: Penstock's is mesh.sequence."""
