"""penstock top: its texts from made-up ranks, and a terminal in front of real ones."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pathlib
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from unittest import mock

import models
import psutil
import pytest

import penstock
from penstock import cli
from penstock.cli import terminal as screen
from penstock.cli import top_text
from penstock.cli.live_status import Place
from penstock.cli.top_text import Line, View
from penstock.monitor import report

# ---- texts

NUMBERS = {
    "step": 419.0,
    "age_s": 0.4,
    "step_s": 0.8,
    "loss": 2.14321,
    "grad_norm": 0.83,
    "lr": 3e-4,
    "samples_per_s": 20.0,
    "tokens_per_s": 12345.0,
    "mfu": 0.412,
    "exposed_s": 0.2,
    "device_bytes": 12.5 * 2**30,
    "host_bytes": 3.0 * 2**30,
    "disk_bytes": 0.0,
}
ABOUT = {
    "strategy": "zero3",
    "transport": "shm",
    "config": {"schedule": {"total_steps": 1000}},
}
WAITS = "waits for rank 1 in `move u3 param all_gather(local) (h.2)` (lane gather), at `forward u2`"


def place(rank, late=1, numbers=NUMBERS):
    if rank == late:
        return Place(rank, str(4000 + rank), 420, 31.2, "at `forward u2 (h.1)`", False, numbers)
    return Place(rank, str(4000 + rank), 420, 30.0 - rank / 10, WAITS, True, numbers)


def view(ranks=2, late=1, numbers=NUMBERS, **changed):
    given = {
        "name": "a",
        "ranks": ranks,
        "places": [place(rank, late, numbers) for rank in range(ranks)],
        "late": [late],
        "verdict": f"late: rank {late}",
        "elapsed_s": 754.0,
        "about": ABOUT,
        "pace_s": 0.8,
    }
    return View(**given | changed)


def texts(views, columns=160, rows=50):
    lines = top_text.frame(views, columns, rows)
    assert len(lines) <= rows and all(len(line.text) <= columns for line in lines)
    return [line.text for line in lines]


def test_a_run_as_a_page():
    assert texts([view()]) == [
        "a  zero3, 2 ranks, shm, elapsed 12:34",
        "step 419 of 1000  [########............]  42 %  7:44 left",
        "loss 2.1432  tokens/s 12.3k  MFU 41.2 %  grad norm 0.83  lr 0.0003",
        "late: rank 1",
        "rank   pid  step  s/step  waited    device   host   last     for  what",
        f"   0  4000   420     0.8    25 %  12.5 GiB  3 GiB  0.4 s  30.0 s  {WAITS}",
        "   1  4001   420     0.8    25 %  12.5 GiB  3 GiB  0.4 s  31.2 s  at `forward u2 (h.1)`",
        " all         420     0.8    25 %    25 GiB  6 GiB  0.4 s          2 here, 1 wait",
    ]


def test_what_is_late_stands_out():
    styles = [line.style for line in top_text.frame([view()], 160, 50)]
    assert styles == ["bold", "", "", "late", "bold", "dim", "late", "bold"]


# columns -> those of the table
WIDTHS = {
    160: "rank pid step s/step waited device host last for what",
    120: "rank pid step s/step waited device host last for what",
    80: "rank step s/step waited device host for what",
    60: "rank step s/step waited for what",
    40: "rank step what",
    20: "rank step what",
}


@pytest.mark.parametrize("columns", WIDTHS)
def test_narrow_terminals_lose_what_matters_least(columns):
    lines = texts([view()], columns)
    head = next(line for line in lines if line.startswith("rank"))
    assert head.split() == WIDTHS[columns].split()
    assert len(lines) == 8


@pytest.mark.parametrize("rows", [8, 12, 20, 24])
def test_few_rows_show_the_late_and_the_busy_first(rows):
    busy = Place(40, "4040", 420, 5.0, "at `backward u3`", False, NUMBERS)
    gone = Place(50, "4050", None, None, "gone: it ended, or closed its engine")
    places = [place(rank, late=33) for rank in range(64)]
    places[40], places[50] = busy, gone
    lines = texts([view(64, 33, places=places)], 80, rows)
    assert len(lines) == rows
    shown = [line.split()[0] for line in lines[5:-2]]
    assert shown == ["33", "50", "40", *map(str, range(60))][: len(shown)]
    assert lines[-2] == f"... and {64 - len(shown)} more"
    assert lines[-1].split()[0] == "all" and "63 here, 61 wait" in lines[-1]


def test_tiny_terminals_keep_the_verdict():
    assert texts([view(64)], 30, 4)[-1] == "late: rank 1"


# name -> what is changed, what is there, what is not
CASES = {
    "nothing known yet": (
        {"numbers": {}, "about": {}, "name": ""},
        ["2 ranks, elapsed 12:34", "rank   pid  step     for  what"],
        ["loss", "nan", "MFU", "s/step", "left"],
    ),
    "numbers not known": (
        {"numbers": dict.fromkeys(NUMBERS, math.nan)},
        ["a  zero3, 2 ranks"],
        ["loss", "nan", "MFU", "s/step", "device", "waited", "left"],
    ),
    "no tokens": (
        {"numbers": NUMBERS | {"tokens_per_s": math.nan}},
        ["samples/s 20"],
        ["tokens/s"],
    ),
    "no total": ({"about": {"strategy": "zero3"}}, ["\n419 steps\n"], ["left", "["]),
    "no pace": ({"pace_s": None}, ["42 %"], ["left"]),
    "past the total": (
        {"numbers": NUMBERS | {"step": 1200.0}},
        ["step 1200 of 1000  [####################]  100 %\n"],
        ["left"],
    ),
    "on disk": ({"numbers": NUMBERS | {"disk_bytes": 2.0**41}}, ["disk", "2 TiB", "4 TiB"], []),
    "minutes": ({"numbers": NUMBERS | {"age_s": 125.0}}, ["2:05"], []),
    "one rank": (
        {"ranks": 1, "places": [place(1)], "late": [], "verdict": ""},
        ["zero3, 1 rank, elapsed"],
        ["shm", "late", "all"],
    ),
    "letters that a terminal would obey": (
        {"verdict": "late: \x1b[2Jrank\n1"},
        ["late: ?[2Jrank?1"],
        ["\x1b"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_is_shown(name):
    changed, there, missing = CASES[name]
    text = "\n".join(texts([view(**changed)]))
    assert all(part in text for part in there), text
    assert not any(part in text for part in missing), text


def test_several_runs_share_the_rows():
    lines = texts([view(8), view(8, name="b"), view(8, name="c")], 80, 24)
    titles = [line.split()[0] for line in lines if "elapsed" in line]
    assert titles == ["a", "b", "c"]
    lines = texts([view(8)] * 5, 80, 15)
    assert lines[-1] == "... and 3 more runs"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (59.9, "0:59"), (754.0, "12:34"), (3723.0, "1:02:03")]
)
def test_clock(seconds, text):
    assert top_text.clock(seconds) == text


def test_bytes_have_whole_digits():
    assert report.size(1001 * 2**20) == "1001 MiB"


# ---- real ranks

SCRIPT = """
import os, pathlib, sys, time
import torch, penstock
here = pathlib.Path(__file__).parent
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)]
engine = penstock.initialize(torch.nn.Sequential(*layers), {
    "strategy": "zero3", "monitor": {"path": str(here / "run")}, "comm": {"timeout_s": 600},
    "schedule": {"type": "linear", "total_steps": 10},
})
for step in range(8):
    if step == 6 and os.environ["RANK"] == "0":
        (here / "stuck").touch()
        while not (here / "go").exists():
            time.sleep(0.02)
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.step()
engine.close()
"""


def wait_for(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def top(*args):
    """Its exit code and what it says, without a terminal."""
    out, err = io.StringIO(), io.StringIO()
    wide = mock.patch.dict(os.environ, {"COLUMNS": "160"})  # a worker of pytest-xdist has 80
    with wide, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(["top", *map(str, args)])
        except SystemExit as error:  # argparse's
            code = error.code
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def training(folder):
    """Two ranks, one of which stops before the seventh step, until there is a file "go"."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(folder / "train.py")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for((folder / "stuck").exists)
            wait_for(lambda: "late: rank 0" in top(process.pid)[1])
            yield process
        finally:
            process.kill()


class Terminal:
    """In front of a penstock top."""

    def __init__(self, *args, **environment):
        self.own, side = os.openpty()
        self.path = os.ttyname(side)
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.side, self.before, self.text = side, termios.tcgetattr(side), ""
        # Who leads a session and opens a terminal has it for its own, and so gets its Ctrl-C.
        shell = ["sh", "-c", 'tty=$1; shift; exec "$@" <>"$tty" >&0 2>&0', "sh", self.path]
        command = [sys.executable, "-m", "penstock", "top", "--every", "0.1", *map(str, args)]
        self.process = subprocess.Popen(
            [*shell, *command],
            env=os.environ | {"TERM": "xterm", "NO_COLOR": ""} | environment,
            start_new_session=True,
        )

    def read(self, part, seconds=240.0):
        """Until that comes."""
        end = time.monotonic() + seconds
        while part not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.own], [], [], 0.1)[0]:
                self.text += os.read(self.own, 65536).decode()

    def press(self, key):
        os.write(self.own, key)

    def end(self):
        """Its exit code, when it has left the terminal as it was."""
        self.read("\x1b[?25h\x1b[?1049l")
        code = self.process.wait(timeout=240)
        assert termios.tcgetattr(self.side) == self.before
        return code

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.side)


@contextlib.contextmanager
def terminal(*args, until="late: rank 0", **environment):
    made = Terminal(*args, **environment)
    try:
        made.read(until)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def place_of_run(tmp_path_factory):
    return tmp_path_factory.mktemp("top")


@pytest.fixture(scope="module")
def run(place_of_run):
    with training(place_of_run) as process:
        yield process


def test_once_by_folder_launcher_and_rank(run, place_of_run):
    ranks = psutil.Process(run.pid).children()
    for name in (place_of_run / "run", run.pid, ranks[0].pid, ranks[1].pid):
        code, out, err = top(name, "--once")
        assert code == 0, err
        lines = out.splitlines()
        assert "late: rank 0" in lines and "\x1b" not in out
        first, second = (next(one for one in lines if one.split()[0] == rank) for rank in "01")
        pids = {first.split()[1], second.split()[1]}
        assert pids == {str(rank.pid) for rank in ranks}
        assert "at `the caller's code" in first and "waits for rank 0 in `" in second
        named = "run  zero3, 2 ranks, shm, elapsed 0:" in lines[0]
        assert named if name == place_of_run / "run" else lines[0].startswith("2 ranks, elapsed")


def test_numbers_are_those_of_the_last_step(run, place_of_run):
    lines = top(place_of_run / "run")[1].splitlines()
    row = json.loads((place_of_run / "run/metrics.jsonl").read_text().splitlines()[5])
    assert row["step"] == 6
    assert lines[1].startswith("step 6 of 10  [############........]  60 %")
    assert f"loss {row['loss']:.4f}" in lines[2] and "samples/s" in lines[2]
    heads = {"s/step", "waited", "device", "last"}
    assert any(heads <= set(line.split()) for line in lines), lines


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_keys_leave_the_terminal_as_it_was(key, run, place_of_run):
    with terminal(place_of_run / "run") as shown:
        assert shown.text.startswith("\x1b[?1049h\x1b[?25l")
        assert termios.tcgetattr(shown.side) != shown.before
        assert "\x1b[1;31mlate: rank 0\x1b[0m" in shown.text
        shown.press(key)
        assert shown.end() == 0


def test_colours_can_be_off(run):
    with terminal(run.pid, NO_COLOR="1") as shown:
        assert not re.search(r"\x1b\[[\d;]*m", shown.text)
        shown.press(b"q")
        assert shown.end() == 0


def test_signals_leave_the_terminal_as_it_was(run):
    with terminal(run.pid) as shown:
        shown.process.send_signal(signal.SIGTERM)
        assert shown.end() == 128 + signal.SIGTERM


def test_a_stopped_one_gives_the_terminal_back_meanwhile(run):
    with terminal(run.pid) as shown:
        shown.press(b"\x1a")
        process = psutil.Process(shown.process.pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        shown.read("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.side) == shown.before
        shown.text = ""
        process.send_signal(signal.SIGCONT)
        shown.read("late: rank 0")
        shown.press(b"q")
        assert shown.end() == 0


def test_it_ends_with_the_run(run, place_of_run):
    """Ends the run, so it is the last of those that look at it."""
    with terminal(place_of_run / "run") as shown, terminal(run.pid) as by_launcher:
        (place_of_run / "go").touch()
        assert run.wait(timeout=240) == 0
        shown.read("has ended")
        assert shown.end() == 0
        rows = (place_of_run / "run/metrics.jsonl").read_text().splitlines()
        loss = json.loads(rows[-1])["loss"]
        assert f"run: the run has ended; its last step was 8, loss {loss:.4f}" in shown.text
        by_launcher.read("the run has ended")
        assert by_launcher.end() == 0
    code, out, err = top(place_of_run / "run")
    assert (code, err) == (0, "")
    assert out.startswith("run: the run has ended; its last step was 8, loss")


RESTARTED = """
import os, pathlib, sys, time
import torch, penstock
here = pathlib.Path(__file__).parent
def until(name):
    while not (here / name).exists():
        time.sleep(0.02)
again = (here / "fail").exists()
if again:
    until("begin")
engine = penstock.initialize(torch.nn.Linear(8, 8), {"strategy": "ddp"})
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
(here / ("trained" + "again" * again)).touch()
until("end" if again else "fail")
sys.exit(0 if again else 3)
"""


def test_ranks_that_are_started_again_are_followed(tmp_path):
    (tmp_path / "train.py").write_text(RESTARTED, encoding="utf-8")
    options = ["--nproc", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "penstock", "run", *options, str(tmp_path / "train.py")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for((tmp_path / "trained").exists)
            with terminal(process.pid, until="1 rank, elapsed") as shown:
                (tmp_path / "fail").touch()
                shown.read("no engine is open")
                shown.text = ""
                (tmp_path / "begin").touch()
                shown.read("1 rank, elapsed")
                (tmp_path / "end").touch()
                shown.read("the run has ended")
                assert shown.end() == 0
            assert process.wait(timeout=240) == 0
        finally:
            process.kill()


def test_a_process_that_has_the_number_now_is_another(tmp_path):
    """A pid is given again; and the folder may be of another machine."""
    engine = penstock.initialize(models.build("gpt"), {})
    about = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert top(tmp_path)[1].splitlines()[-2].startswith("rank")
    (tmp_path / "run.json").write_text(json.dumps(about | {"started": time.time() - 1e6}))
    assert top(tmp_path)[1] == f"{tmp_path.name}: the run has ended\n"
    (tmp_path / "run.json").write_text(json.dumps(about | {"host": "elsewhere"}))
    code, out, err = top(tmp_path)
    assert (code, out) == (2, "") and "began on host elsewhere" in err
    engine.close()


WRONG = {
    "no process": ("4194303", "[top] there is no process 4194303"),
    "another's": ("", "have no engine"),
    "no folder": (
        "nowhere/at/all",
        "is neither a process id nor the folder of a run: it has no run.json",
    ),
    "no run": (
        str(pathlib.Path(__file__).parent),
        "is neither a process id nor the folder of a run",
    ),
    "too fast": ("--every=0", "0 is not a number of seconds from 0.05 to 3600"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_runs_are_one_sentence(name):
    argument, says = WRONG[name]
    with subprocess.Popen(["sleep", "30"]) as other:
        code, out, err = top(argument or other.pid)
        other.kill()
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]


def test_lines_have_styles_on_a_terminal_only():
    assert screen.styled(Line("late: rank 1", "late"), False) == "late: rank 1"
    assert screen.styled(Line("late: rank 1", "late"), True) == "\x1b[1;31mlate: rank 1\x1b[0m"
