"""The engine that users call, and what of it is written in Python."""
