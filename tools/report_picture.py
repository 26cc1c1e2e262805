"""Makes a picture of a run's report, for a page such as the README: RUN OUT.png.

Writes the report again and captures it with headless Chromium, in the light scheme. Pillow, which
`make setup` installs, cuts out a part, with as many colours as the limit of the file's size
allows.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile

from penstock.monitor import report

MOST_BYTES = 200 << 10
_COLOURS = (256, 128, 64, 32, 16)
_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the page, in the page's pixels; `scale` is the picture's pixels for each."""

    width: int = 1280
    height: int = 900
    top: int = 0
    scale: int = 2


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def command(profile: pathlib.Path, size: tuple[int, int], dark: bool = False) -> list[str]:
    """Returns the command of a headless browser, without the page's address.

    Raises FileNotFoundError: there is no browser.
    """
    found = browser()
    if found is None:
        raise FileNotFoundError("no chromium and no google-chrome here: apt-get install chromium")
    return [
        found,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--user-data-dir={profile}",
    ]


def cut(picture: pathlib.Path, part: Part, most_bytes: int = MOST_BYTES) -> None:
    """Cuts off what is above the part, and reduces the colours until the file is small enough.

    Raises ValueError: even with 16 colours, the file is too large.
    """
    from PIL import Image  # noqa: PLC0415 - not needed to show a page

    with Image.open(picture) as opened:
        top = part.top * part.scale
        whole = opened.convert("RGB").crop((0, top, opened.width, opened.height))
    for colours in _COLOURS:
        # No dithering: it would speckle plain areas, which also takes more bytes.
        made = whole.quantize(colours, dither=Image.Dither.NONE)
        made.save(picture, optimize=True)
        if picture.stat().st_size <= most_bytes:
            return
    raise ValueError(f"{picture} has {picture.stat().st_size} bytes, above {most_bytes}")


def take(run: pathlib.Path, out: pathlib.Path, part: Part) -> None:
    """Writes the picture.

    Raises ValueError: `run` is not a run's folder. RuntimeError: the browser wrote no picture.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        page, shot = folder / "report.html", folder / "shot.png"
        report.write([run], page)
        taken = [
            *command(folder / "profile", (part.width, part.top + part.height)),
            f"--force-device-scale-factor={part.scale}",
            f"--screenshot={shot}",
        ]
        done = subprocess.run(
            [*taken, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if not shot.exists():
            raise RuntimeError(f"the browser ended with {done.returncode}: {done.stderr[-500:]}")
        cut(shot, part)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shot, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the run's folder")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.png")
    whole = Part()
    parser.add_argument("--width", type=int, default=whole.width, help="width of the page")
    parser.add_argument("--height", type=int, default=whole.height, help="height of the part")
    parser.add_argument("--top", type=int, default=whole.top, help="where the part begins")
    parser.add_argument("--scale", type=int, default=whole.scale, help="pixels per page pixel")
    options = parser.parse_args()
    part = Part(options.width, options.height, options.top, options.scale)
    try:
        take(options.run, options.out, part)
    except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(f"report_picture: {error}")
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
