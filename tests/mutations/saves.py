"""Bugs of checkpoints: what is saved behind training's back, and what is read."""

from __future__ import annotations

from planted import TABLES, Mutation, Pytest, draw, gtest

CHECKPOINT = "tests/python/test_checkpoint.py"
LAYOUTS = "tests/python/test_checkpoint_layouts.py"
CKPT = "src/ckpt/ckpt_test"


OF_CHECKPOINTS = [
    Mutation(
        "an update changes what a save still reads",
        "src/exec/updates.cpp",
        "    tell_changes(flat, state);\n",
        "",
        TABLES,
    ),
    Mutation(
        "a write to swap comes before a save has read it",
        "src/mem/disk_traffic.cpp",
        "if (const auto watch = watch_.load()) watch->disk_changes(buffer.offset, buffer.bytes());",
        "",
        TABLES,
    ),
    Mutation(
        "parameters that users see are not copied when a save begins",
        "src/ckpt/save.cpp",
        "source.holding.users || data.device != nullptr;",
        "data.device != nullptr;",
        Pytest((CHECKPOINT, "-k", "edited_behind_a_save")),
    ),
    Mutation(
        "what users wrote to low-precision parameters is not saved",
        "src/ckpt/save.cpp",
        "    device::take_edits(data, buffer.dtype, device::address_of(edits, data.device),\n"
        "                       source.holding.edits->dtype, source.numel);\n",
        "",
        Pytest((CHECKPOINT, "-k", "edits_are_saved and bf16")),
    ),
    Mutation(
        "a copy is written although the original was given out",
        "src/ckpt/pending_writes.cpp",
        "    if (stages_[index] == Stage::kWaiting) return copy(lock, index);\n",
        "    return copy(lock, index);\n",
        gtest(CKPT, "PendingTest.WhatIsBeingWrittenIsWaitedFor"),
    ),
    Mutation(
        "checksums are not compared",
        "src/ckpt/shard.cpp",
        "== sums[i]) continue;",
        "== sums[i] || true) continue;",
        gtest(CKPT, "ShardTest.EveryFlippedByteIsSeen"),
    ),
    Mutation(
        "step counts of parameters are not restored",
        "src/engine/model/checkpoints.cpp",
        "slot.updates = found == updates.end() ? 0 : found->second;",
        "(void)found;",
        Pytest((LAYOUTS, "-k", "bitwise and zero3-True")),
    ),
    Mutation(
        "a gather makes another dtype of what it gathers",
        "src/exec/mesh_walk.cpp",
        "kind == PassKind::kAllReduce || kind == PassKind::kAllGather",
        "kind == PassKind::kAllReduce",
        draw(249),
    ),
]
