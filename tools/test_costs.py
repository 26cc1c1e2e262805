"""Lists what each test file costs and how many planted bugs only its tests must catch.

    pytest ... --junitxml REPORT.xml
    ctest --preset release --output-junit REPORT2.xml
    tools/test_costs.py REPORT.xml REPORT2.xml

A planted bug (tests/mutations) counts for the file or C++ program that run.py runs to catch it. The
last column shows what a candidate for the weekly run costs: seconds per planted bug.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ET  # noqa: S405 - reads a report that pytest or ctest wrote

ROOT = pathlib.Path(__file__).resolve().parents[1]


def planted() -> collections.Counter[str]:
    """Returns the number of planted bugs by test file or name of a C++ program."""
    sys.path.insert(0, str(ROOT / "tests/mutations"))
    from planted import Pytest  # noqa: PLC0415 - from the folder above
    from table import MUTATIONS  # noqa: PLC0415

    return collections.Counter(
        one.test.arguments[0].partition("::")[0]
        if isinstance(one.test, Pytest)
        else pathlib.Path(one.test.path).name
        for one in MUTATIONS
    )


def costs(report: pathlib.Path) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Returns seconds and number of cases by test file or name of a C++ program."""
    seconds: collections.Counter[str] = collections.Counter()
    cases: collections.Counter[str] = collections.Counter()
    for case in ET.parse(report).iter("testcase"):  # noqa: S314
        found = re.match(r"(tests[.\w]*?\.test_\w+)", case.get("classname", ""))
        name = found[1].replace(".", "/") + ".py" if found else case.get("name", "")
        seconds[name] += float(case.get("time", 0))
        cases[name] += 1
    return seconds, cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=pathlib.Path, help="JUnit XML files")
    faults = planted()
    print(f"{'seconds':>8} {'cases':>6} {'planted':>8} {'s/planted':>10}  file")
    seconds: collections.Counter[str] = collections.Counter()
    cases: collections.Counter[str] = collections.Counter()
    for report in parser.parse_args().reports:
        for total, found in zip((seconds, cases), costs(report), strict=True):
            total.update(found)
    for name, spent in seconds.most_common():
        each = f"{spent / faults[name]:10.1f}" if faults[name] else f"{'-':>10}"
        print(f"{spent:8.1f} {cases[name]:6} {faults[name]:8} {each}  {name}")
    for name in sorted(set(faults) - set(seconds)):
        print(f"{'not run':>8} {'':6} {faults[name]:8} {'':10}  {name}")
    print(f"{sum(seconds.values()):8.1f} {sum(cases.values()):6} {sum(faults.values()):8}")


if __name__ == "__main__":
    main()
