"""DeepSpeed's expert layers, which are not supported yet. A model's own experts train unchanged."""
