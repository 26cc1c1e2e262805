"""Lays out the documentation for mkdocs in build/docs: pages, the API reference, and a config.

`make docs` runs it, then mkdocs. Pages come from docs/ and from the READMEs that they link to. The
Python reference comes from docstrings (mkdocstrings), the C++ reference from include/penstock. A
link to another file of the repository becomes a link to a page that shows this file. A page that is
missing from NAV, a page of NAV that does not exist and a broken link are errors.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import sys

import cpp_reference

ROOT = pathlib.Path(__file__).parents[1]
BUILD = ROOT / "build/docs"
PAGES = BUILD / "pages"
LINK = re.compile(r"(?<!\\)(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
TABLE_CODE = re.compile(r"`[^`\n]*`")
CSS = """.md-grid { max-width: 72rem; }
.md-typeset table:not([class]) { font-size: .7rem; }
.md-typeset table:not([class]) td { min-width: 6rem; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-typeset pre > code { font-size: .72rem; }
"""
# Page of the site -> file of the repository.
OTHERS = {
    "readme.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "simulated_accelerator.md": "tests/device/README.md",
    "skeleton.md": "examples/skeleton/README.md",
}
NAV: dict[str, str | dict[str, str]] = {
    "Home": "index.md",
    "Start": {
        "How a step works": "how_a_step_works.md",
        "From torch": "from_torch.md",
        "From FSDP2": "from_fsdp2.md",
        "From DeepSpeed": "deepspeed.md",
        "From Accelerate or Lightning": "from_accelerate_lightning.md",
        "Troubleshooting": "troubleshooting.md",
    },
    "Guides": {
        "Training": "training.md",
        "Tables of placements": "tables.md",
        "Slow networks": "slow_networks.md",
        "Several ranks, one model": "parallel.md",
        "Inference": "inference.md",
        "Checkpoints": "checkpoints.md",
        "Launching": "launching.md",
        "Monitoring": "monitoring.md",
        "Devices": "devices.md",
        "Checking a GPU machine": "gpu_check.md",
    },
    "Reference": {
        "Config": "config.md",
        "Engine": "engine.md",
        "DeepSpeed differences": "deepspeed_differences.md",
        "Errors": "errors.md",
        "Formats": "formats.md",
        "Idioms": "idioms.md",
        "Compatibility": "compatibility.md",
    },
    "Python API": {},
    "C++ API": {},
    "Project": {
        "README": "readme.md",
        "Design": "design.md",
        "Decisions": "decisions.md",
        "Benchmarks": "benchmarks.md",
        "Tests": "tests.md",
        "Simulated accelerator": "simulated_accelerator.md",
        "Contributing": "contributing.md",
        "Skeleton of a feature": "skeleton.md",
        "Changelog": "changelog.md",
    },
}
# Page of the Python reference -> (public name, where it is defined).
PYTHON = {
    "penstock": [
        ("penstock.initialize", "penstock.front.engine.initialize"),
        ("penstock.init", "penstock.front.sharded_init.init"),
        ("penstock.ResumableLoader", "penstock.front.data.ResumableLoader"),
        ("penstock.Lion", "penstock.front.optimizer.Lion"),
        ("penstock.format_ledger", "penstock.front.ledger.format_ledger"),
        ("penstock.trace", "penstock.monitor.timelines.trace"),
    ],
    "penstock.Engine": [("penstock.Engine", "penstock.front.engine.Engine")],
    "penstock.schedules": [
        (f"penstock.schedules.{name}", f"penstock.front.schedules.{name}")
        for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    ],
    "penstock.environment": [
        (f"penstock.environment.{name}", f"penstock.front.environment.{name}")
        for name in ("adopt", "node_place", "expand_hostlist")
    ],
    "penstock.hf": [("penstock.hf.config", "penstock.hf.config")],
    "penstock.lightning": [
        (f"penstock.lightning.{name}", f"penstock.lightning.{name}")
        for name in ("PenstockStrategy", "PenstockFabricStrategy")
    ],
    "penstock.deepspeed": [
        (f"penstock.deepspeed.{name}", f"penstock.deepspeed.{name}")
        for name in ("install", "installed", "uninstall")
    ],
    "penstock.launch": [
        ("penstock.launch.launch", "penstock.launch.local.launch"),
        ("penstock.launch.deepspeed_main", "penstock.launch.deepspeed_main"),
    ],
}
ERRORS = """
`penstock.ConfigError`, `penstock.RuntimeFault` and `penstock.Bug` are C++ exceptions; see
[Errors](../errors.md).
"""


def sources() -> dict[str, pathlib.Path]:
    """Page of the site -> its file."""
    found = {page.name: page for page in sorted((ROOT / "docs").glob("*.md"))}
    return found | {name: ROOT / path for name, path in OTHERS.items()}


def linked(text: str, file: pathlib.Path, page_of: dict[pathlib.Path, str]) -> str:
    """The page's text with links between files turned into links between pages."""

    def change(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return found[0]
        path, mark, anchor = target.partition("#")
        whole = (file.parent / path).resolve()
        if whole in page_of:
            return f"{before}{page_of[whole]}{mark}{anchor}{after}"
        if not whole.exists():
            return found[0]  # mkdocs reports it
        if whole.suffix in (".png", ".svg"):
            shutil.copy(whole, PAGES / whole.name)
            return f"{before}{whole.name}{after}"
        return f"{before}{shown(whole)}{after}"

    return LINK.sub(change, text)


def shown(file: pathlib.Path) -> str:
    """A page with the contents of a file or the names in a folder."""
    name = str(file.relative_to(ROOT))
    page = PAGES / "source" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    kind = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".json": "json"}.get(file.suffix, "text")
    if file.is_dir():
        body = "\n".join(sorted(one.name for one in file.iterdir() if one.name[0] not in "._"))
        kind = "text"
    else:
        body = file.read_text(encoding="utf-8").rstrip("\n")
    page.write_text(f"# `{name}`\n\n````{kind}\n{body}\n````\n", encoding="utf-8")
    return f"source/{name}.md"


def for_markdown(text: str) -> str:
    """GitHub's dialect -> Python-Markdown's: no escaped bars in the code of tables."""

    def unescaped(line: str) -> str:
        if not line.startswith("|"):
            return line
        return TABLE_CODE.sub(lambda code: code[0].replace("\\|", "|"), line)

    return "\n".join(unescaped(line) for line in text.splitlines()) + "\n"


def python_pages() -> dict[str, str]:
    found = {}
    for title, names in PYTHON.items():
        path = f"api/python/{title.rpartition('.')[2].lower()}.md"
        parts = [f"# {title}\n"]
        for public, where in names:
            whole = public == title  # the page is about this class
            options = {
                "heading": public.removeprefix(title + "."),
                "show_root_heading": str(not whole).lower(),
                "show_root_toc_entry": str(not whole).lower(),
            }
            lines = [f"      {key}: {value}" for key, value in options.items()]
            parts.append("\n".join([f"::: {where}", "    options:", *lines, ""]))
        if title == "penstock":
            parts.append("## Errors\n" + ERRORS.replace("../", "../../"))
        write(path, "\n".join(parts))
        found[title] = path
    return found


def cpp_pages() -> dict[str, str]:
    found = {}
    for header in sorted((ROOT / "include/penstock").glob("*.h")):
        if header.name == "export.h":
            continue
        path = f"api/cpp/{header.stem}.md"
        write(path, cpp_reference.page(header))
        found[f"penstock/{header.name}"] = path
    return found


def write(path: str, text: str) -> None:
    page = PAGES / path
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def config(nav: dict[str, str | dict[str, str]]) -> str:
    lines = ["INHERIT: ../../mkdocs.yml", "docs_dir: pages", "site_dir: ../site"]
    lines += [
        "plugins:",
        "  - search",
        "  - autorefs",
        "  - mkdocstrings:",
        "      handlers:",
        "        python:",
        f"          paths: ['{ROOT / 'python'}']",
        "          options:",
        "            docstring_style: google",
        "            inherited_members: true",
        "            filters: ['!^_']",
        "            show_source: false",
        "            show_bases: false",
        "            show_root_full_path: false",
        "            separate_signature: true",
        "            members_order: source",
        "            docstring_options: {warn_unknown_params: false}",
        "nav:",
    ]
    for title, entry in nav.items():
        if isinstance(entry, str):
            lines.append(f"  - {title}: {entry}")
            continue
        lines.append(f"  - {title}:")
        lines += [f"      - {name}: {page}" for name, page in entry.items()]
    return "\n".join(lines) + "\n"


def lay_out(allow_missing: bool) -> list[str]:
    """Writes build/docs; returns what is wrong."""
    shutil.rmtree(BUILD, ignore_errors=True)
    PAGES.mkdir(parents=True)
    write("site.css", CSS)
    files = sources()
    page_of = {file.resolve(): name for name, file in files.items()}
    problems = []
    for name, file in files.items():
        if not file.exists():
            problems.append(f"{file.relative_to(ROOT)} does not exist")
            continue
        write(name, for_markdown(linked(file.read_text(encoding="utf-8"), file, page_of)))
    home = PAGES / "index.md"
    home.write_text("---\nhide: [navigation]\n---\n" + home.read_text(encoding="utf-8"), "utf-8")
    nav: dict[str, str | dict[str, str]] = {}
    for title, entry in NAV.items():
        if isinstance(entry, str):
            nav[title] = entry
            continue
        absent = {name for name, page in entry.items() if not (PAGES / page).exists()}
        problems += [f"{entry[name]} of NAV does not exist" for name in sorted(absent)]
        nav[title] = {name: page for name, page in entry.items() if name not in absent}
    nav["Python API"], nav["C++ API"] = python_pages(), cpp_pages()
    (BUILD / "mkdocs.yml").write_text(config(nav), encoding="utf-8")
    return [] if allow_missing else problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-missing", action="store_true", help="accept missing pages of NAV")
    options = parser.parse_args()
    problems = lay_out(options.allow_missing)
    if problems:
        sys.exit("[docs] " + "\n[docs] ".join(problems))
    print(f"[docs] {sum(1 for _ in PAGES.rglob('*.md'))} pages in {os.path.relpath(PAGES)}")


if __name__ == "__main__":
    main()
