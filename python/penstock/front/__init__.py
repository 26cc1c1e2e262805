"""The Python front: the engine that users call and the code around the C++ core."""
