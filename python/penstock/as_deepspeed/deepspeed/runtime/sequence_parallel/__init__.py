"""DeepSpeed's sequence parallelism. (Penstock's own is mesh.sequence.)"""
