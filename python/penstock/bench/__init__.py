"""What a machine reaches when all ranks use it at once (docs/monitoring.md, "Calibration").

`penstock bench` starts the ranks; each runs `python -m penstock.bench`.
"""
