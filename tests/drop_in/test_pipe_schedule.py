"""The schedules that scripts list: stages that run them train each micro-batch once, with few
buffers, and never wait for each other forever."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Runs the steps of all stages. Messages between two stages arrive in the order of the sends.
RUN = """
import collections
import penstock.deepspeed
penstock.deepspeed.install()
from deepspeed.runtime.pipe import schedule


def ran(kind, stages, micros):
    lists = [[one for step in kind(micros, stages, p) for one in step] for p in range(stages)]
    counts = [len([*kind(micros, stages, p)]) for p in range(stages)]
    buffers = [{} for _ in range(stages)]  # buffer -> micro-batch whose activations it holds
    done = [collections.defaultdict(list) for _ in range(stages)]
    messages = collections.defaultdict(collections.deque)
    places, most = [0] * stages, [0] * stages
    trains = kind is schedule.TrainSchedule
    while any(place < len(one) for place, one in zip(places, lists)):
        moved = False
        for p in range(stages):
            while places[p] < len(lists[p]):
                one, held = lists[p][places[p]], buffers[p]
                name, buffer = one.name, getattr(one, "buffer_id", None)
                assert buffer is None or buffer < kind(micros, stages, p).num_pipe_buffers()
                number = len(done[p][name])
                if name == "LoadMicroBatch":
                    if p == 0:
                        assert not trains or buffer not in held
                        held[buffer] = number
                elif name == "RecvActivation":
                    if not messages[p - 1, p]:
                        break
                    assert not trains or buffer not in held
                    held[buffer] = messages[p - 1, p].popleft()
                elif name == "SendActivation":
                    messages[p, p + 1].append(held[buffer])
                elif name == "ForwardPass":
                    assert held[buffer] == number
                elif name == "RecvGrad":
                    if not messages[p + 1, p]:
                        break
                    assert held[buffer] == messages[p + 1, p].popleft()
                elif name == "BackwardPass":
                    assert held[buffer] == number < len(done[p]["ForwardPass"])
                elif name == "SendGrad":
                    messages[p, p - 1].append(held[buffer])
                if name == ("SendGrad" if p else "BackwardPass") and trains:
                    del held[buffer]
                done[p][name].append(buffer)
                most[p] = max(most[p], len(held))
                places[p] += 1
                moved = True
        assert moved, "every stage waits"
    assert not any(messages.values())
    return counts, [{name: len(found) for name, found in one.items()} for one in done], most


for stages in range(1, 5):
    for micros in range(1, 9):
        counts, done, most = ran(schedule.TrainSchedule, stages, micros)
        assert counts == [2 * (micros + stages - 1)] * stages
        for p, one in enumerate(done):
            ends = (p > 0) + (p < stages - 1)
            expected = {"ForwardPass": micros, "BackwardPass": micros, "OptimizerStep": 1,
                        "ReduceGrads": 1, "ReduceTiedGrads": 1}
            expected |= {"LoadMicroBatch": micros} if p in (0, stages - 1) else {}
            expected |= {"SendActivation": micros, "RecvGrad": micros} if p < stages - 1 else {}
            expected |= {"RecvActivation": micros, "SendGrad": micros} if p > 0 else {}
            assert one == expected, (stages, micros, p, one)
            assert most[p] <= max(2, min(stages - p, micros))
        counts, done, _ = ran(schedule.InferenceSchedule, stages, micros)
        assert counts == [micros + stages - 1] * stages
        assert all(one["ForwardPass"] == micros and len(one) <= 4 for one in done)
print("ran")
"""


@pytest.mark.timeout(480)
def test_stages_that_run_the_schedules_train():
    made = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=240, check=False
    )
    assert made.stdout == "ran\n", made.stderr[-2000:]
