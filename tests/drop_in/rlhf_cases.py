"""What test_rlhf.py runs: loops of rlhf_loops.py and their options."""

from __future__ import annotations

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat-sft-zero0": ("chat_sft", {"stage": 0}),
    "chat-sft-zero2": ("chat_sft", {"stage": 2}),
    "chat-sft-zero3-lora": ("chat_sft", {"stage": 3, "lora": True}),
    "chat-sft-zero2-offload-lora": ("chat_sft", {"stage": 2, "offload": True, "lora": True}),
    "chat-sft-zero3-offload": ("chat_sft", {"stage": 3, "offload": True}),
    "chat-reward-zero2": ("chat_reward", {"stage": 2}),
    "chat-reward-zero3": ("chat_reward", {"stage": 3}),
    "chat-reward-zero3-offload": ("chat_reward", {"stage": 3, "offload": True}),
    "chat-ppo-zero0": ("chat_ppo", {"stages": (0, 0)}),
    "chat-ppo-zero2": ("chat_ppo", {"stages": (2, 2), "has": ("ema", "text")}),
    "chat-ppo-zero3": ("chat_ppo", {"stages": (3, 3), "has": ("ema",)}),
    "chat-ppo-zero3-zero2": ("chat_ppo", {"stages": (3, 2), "has": ("lora", "text")}),
    "chat-ppo-zero3-offload": ("chat_ppo", {"stages": (3, 3), "has": ("offload", "lora", "ema")}),
    "open-rlhf-zero2": ("open_rlhf", {"stage": 2, "sleep": True}),
    "open-rlhf-zero3": ("open_rlhf", {"stage": 3, "sleep": True}),
    "open-rlhf-zero3-offload": ("open_rlhf", {"stage": 3, "offload": True}),
    "open-instruct-zero2": ("open_instruct", {"stage": 2}),
    "open-instruct-zero3": ("open_instruct", {"stage": 3}),
    "open-instruct-zero3-offload": ("open_instruct", {"stage": 3, "offload": True}),
}
# Daily each loop with ZeRO-3.
SAMPLE = [
    *("chat-sft-zero3-lora", "chat-reward-zero3", "chat-ppo-zero3"),
    *("open-rlhf-zero3", "open-instruct-zero3-offload"),
]
