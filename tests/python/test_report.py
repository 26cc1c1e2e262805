"""report.html: what it draws is read back, by a parser and from a browser's page."""

from __future__ import annotations

import html.parser
import json
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from penstock import cli
from penstock.monitor import report, run, svg

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tools"))

import report_picture  # noqa: E402

BROWSER = pytest.mark.skipif(report_picture.browser() is None, reason="no Chromium here")
DEMO = pathlib.Path(__file__).parents[2] / "build/demo"


def whole_demo():
    """Whether `make demo` wrote it; a short run of test_examples.py writes there too."""
    metrics = DEMO / "metrics.jsonl"
    return (DEMO / "trace.json").exists() and len(metrics.read_text().splitlines()) >= 50


SCRIPT = """
import sys, torch, penstock
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)]
engine = penstock.initialize(torch.nn.Sequential(*layers), {
    "strategy": "zero3", "units": {"layer_bytes": 1000},
    "offload": {"optimizer": "disk", "path": sys.argv[1]},
    "monitor": {"path": sys.argv[1] + "/run", "trace_first": 4, "trace_steps": 2},
})
for step in range(8):
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.step()
engine.close()
"""


class Drawn(html.parser.HTMLParser):
    """Figures by id: their attributes, and what is drawn in them."""

    def __init__(self, text):
        super().__init__()
        self.figures, self.texts, self._open = {}, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "figure":
            self._open = self.figures[attributes["id"]] = {"of": attributes, "drawn": []}
        elif self._open is not None and tag in ("polyline", "polygon", "rect", "line"):
            self._open["drawn"].append((tag, attributes))

    def handle_endtag(self, tag):
        if tag == "figure":
            self._open = None

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, name, tag="polyline"):
        """series -> [(x, y)] by the picture's axes."""
        figure = self.figures[name]
        (x0, x1), (y0, y1) = (
            [float(one) for one in figure["of"][f"data-{axis}"].split()] for axis in "xy"
        )
        found = {}
        for kind, attributes in figure["drawn"]:
            if kind != tag or "points" not in attributes:
                continue
            points = [point.split(",") for point in attributes["points"].split()]
            found[attributes["data-series"]] = [
                (
                    x0 + (float(x) - svg.LEFT) / (svg.WIDTH - svg.LEFT - svg.RIGHT) * (x1 - x0),
                    y0
                    + (svg.HEIGHT - svg.BOTTOM - float(y))
                    / (svg.HEIGHT - svg.TOP - svg.BOTTOM)
                    * (y1 - y0),
                )
                for x, y in points
            ]
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    (place / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2"]
    subprocess.run([*command, str(place / "train.py"), str(place)], check=True, timeout=240)
    return place / "run"


def check_run(drawn, folder):
    """The last loss, the most memory, the slices."""
    rows = run.rows(folder / "metrics.jsonl")
    (losses,) = drawn.values("loss").values()
    assert round(losses[-1][0]) == rows[-1]["step"]
    assert losses[-1][1] == pytest.approx(rows[-1]["loss"], rel=0.01)
    bands = drawn.values("memory", "polygon")
    top = max(y for points in bands.values() for _, y in points)
    roles = ("param_bytes", "grad_bytes", "optim_bytes", "buffer_bytes")
    assert top == pytest.approx(max(sum(row[role] for role in roles) for row in rows), rel=0.02)
    predicted = json.loads((folder / "run.json").read_text())["predicted"]["total"]
    assert float(drawn.figures["memory"]["of"]["data-y"].split()[1]) >= predicted
    boxes = [one for one, _ in drawn.figures["timeline"]["drawn"] if one == "rect"]
    assert len(boxes) == int(drawn.figures["timeline"]["of"]["data-slices"]) > 50
    assert "zero3" in drawn.texts and report.size(predicted) in drawn.texts


def check(drawn, folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    (losses,) = drawn.values("loss").values()
    assert [round(x) for x, _ in losses] == [row["step"] for row in rows] == list(range(1, 9))
    for (_, y), row in zip(losses, rows, strict=True):
        assert y == pytest.approx(row["loss"], rel=0.01)
    check_run(drawn, folder)
    for name in ("grad_norm", "lr", "samples_per_s", "exposed", "mfu", "disk_gb_per_s"):
        assert drawn.values(name), name


def test_what_is_drawn_is_what_was_measured(folder, capsys):
    assert cli.main(["report", str(folder)]) == 0
    path = pathlib.Path(capsys.readouterr().out.strip())
    text = path.read_text()
    assert path == folder / "report.html"
    assert "http://" not in text and "https://" not in text and "src=" not in text
    check(Drawn(text), folder)


@BROWSER
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_in_a_browser(width, scheme, folder, tmp_path):
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    command = report_picture.command(tmp_path / "profile", (width, 900), dark=scheme == 0)
    dump = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "r.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    check(Drawn(dump.stdout), folder)
    picture = tmp_path / "shot.png"
    subprocess.run(
        [*command, f"--screenshot={picture}", (tmp_path / "r.html").as_uri()],
        capture_output=True,
        timeout=240,
    )
    assert picture.stat().st_size > 20_000


@BROWSER
@pytest.mark.skipif(not whole_demo(), reason="`make demo` writes it")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_of_the_demo(width, tmp_path):
    assert cli.main(["report", str(DEMO), "-o", str(tmp_path / "r.html")]) == 0
    command = report_picture.command(tmp_path / "profile", (width, 900))
    dump = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "r.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    drawn = Drawn(dump.stdout)
    check_run(drawn, DEMO)
    assert "Predicted and measured" in drawn.texts


@BROWSER
def test_a_picture_for_a_page(folder, tmp_path):
    out = tmp_path / "made" / "report.png"
    command = [sys.executable, report_picture.__file__, str(folder), str(out)]
    subprocess.run([*command, "--width", "600", "--top", "300"], check=True, timeout=240)
    with Image.open(out) as made:
        assert made.size == (1200, 1800) and made.mode == "P"
        red, green, blue = made.convert("RGB").getpixel((3, 3))
        assert min(red, green, blue) > 200  # the light scheme
        assert len(made.getcolors()) > 8  # something is drawn
    assert 10_000 < out.stat().st_size <= report_picture.MOST_BYTES


def test_a_picture_of_no_run(tmp_path):
    command = [sys.executable, report_picture.__file__, str(tmp_path), str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "is not the folder of a run" in done.stderr


def test_pictures_keep_to_their_bytes(tmp_path):
    random.seed(0)
    noise = Image.frombytes("RGB", (200, 200), random.randbytes(200 * 200 * 3))
    noise.save(tmp_path / "noise.png")
    whole = (tmp_path / "noise.png").stat().st_size
    part = report_picture.Part(top=20, scale=2)
    report_picture.cut(tmp_path / "noise.png", part, whole // 4)
    assert (tmp_path / "noise.png").stat().st_size <= whole // 4
    assert Image.open(tmp_path / "noise.png").size == (200, 160)
    with pytest.raises(ValueError, match="above 100"):
        report_picture.cut(tmp_path / "noise.png", part, 100)


def test_two_runs(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    about = json.loads((other / "run.json").read_text())
    about["config"]["clip"] = 3.5
    (other / "run.json").write_text(json.dumps(about))
    assert cli.main(["report", str(folder), str(other), "-o", str(tmp_path / "r.html")]) == 0
    drawn = Drawn((tmp_path / "r.html").read_text())
    assert set(drawn.values("loss")) == {"run", "other"}
    assert "clip" in drawn.texts and "3.5" in drawn.texts and "memory2" in drawn.figures


def test_what_a_kill_leaves(folder, tmp_path):
    rows = (folder / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(rows[: len(rows) - 40])
    assert cli.main(["report", str(tmp_path)]) == 0
    drawn = Drawn((tmp_path / "report.html").read_text())
    (losses,) = drawn.values("loss").values()
    assert len(losses) == 7 and "timeline" not in drawn.figures
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "There are no steps yet." in (tmp_path / "report.html").read_text()


def test_no_run(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_step_that_was_trained_again_counts_once(tmp_path):
    told = ((1, 5.0), (2, 4.0), (3, 9.0), (2, 3.0))
    rows = [{"step": step, "loss": loss} for step, loss in told]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert run.read(tmp_path).column("loss") == [(1.0, 5.0), (2.0, 3.0)]


@pytest.mark.parametrize(
    ("low", "high", "binary", "expected"),
    [
        (0, 10, False, [0, 5, 10]),
        (0, 1, False, [0, 0.5, 1]),
        (3, 3, False, [3]),
        (0, 3 << 20, True, [0, 1 << 20, 2 << 20, 3 << 20]),
    ],
)
def test_ticks_are_round(low, high, binary, expected):
    assert svg.ticks(low, high, binary=binary) == pytest.approx(expected)


def test_long_runs_keep_their_ends():
    points = [(float(x), float(x)) for x in range(100_000)]
    assert len(svg.thinned(points)) == 600
    assert svg.thinned(points)[0] == points[0] and svg.thinned(points)[-1] == points[-1]
