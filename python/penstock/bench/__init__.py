"""Measures a machine's speed while all ranks use it at once (docs/monitoring.md, "Calibration").

`penstock bench` starts the ranks; each runs `python -m penstock.bench`.
"""
