"""DeepSpeed's monitors."""
