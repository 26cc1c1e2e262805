"""The cases of own_optimizers.py, which imports deepspeed."""

import itertools

HOW = ("deepspeed", "accelerate", "trainer")
AVERAGED = ("lookahead", "ema")
NAMES = [
    f"{how} free stage{stage} {dtype}"
    for how, stage, dtype in itertools.product(HOW, (1, 2, 3), ("fp32", "bf16"))
]
NAMES += [
    f"{how} {kind} stage{stage} bf16 offload"
    for how, kind, stage in itertools.product(HOW[:2], ("free", *AVERAGED), (1, 2, 3))
]
REFUSED = [
    f"{how} sam stage{stage} {dtype}"
    for how, stage, dtype in (
        ("deepspeed", 1, "fp32"),
        ("deepspeed", 2, "bf16 offload"),
        ("deepspeed", 3, "bf16 offload"),
        ("accelerate", 1, "bf16 offload"),
        ("accelerate", 3, "fp32"),
    )
]
