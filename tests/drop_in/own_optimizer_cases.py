"""The cases of own_optimizers.py, which imports deepspeed."""

import itertools

HOW = ("deepspeed", "accelerate", "trainer")
NAMES = [
    f"{how} stage{stage} {dtype}"
    for how, stage, dtype in itertools.product(HOW, (1, 2, 3), ("fp32", "bf16"))
]
