"""DeepSpeed's experts, which are not built yet; those of a model's own train as they are."""
