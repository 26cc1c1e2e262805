"""What a run says of itself, said wrong."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest, ranks

MONITOR, CHANNEL, DRIVER = (
    "src/engine/watch/monitor.cpp",
    "src/comm/channel.cpp",
    "src/engine/step/driver.cpp",
)
NORM, RECORDER = "src/exec/norm.cpp", "src/trace/recorder.cpp"
METRICS = Pytest(("tests/python/test_monitor.py", "-k", "rows or evaluations"))
TRACES = Pytest(("tests/python/test_trace.py",))

OF_A_RUN = [
    Mutation(
        "a row has the losses of one rank alone",
        NORM,
        "    made.told.add(theirs.told);\n",
        "    if (edits.empty()) made.told.add(theirs.told);\n",
        METRICS,
    ),
    Mutation(
        "what a dropped window counted is the next step's",
        "src/engine/step/core_state.cpp",
        "Raised::kNone) driver->abandon();\n  monitor->drop();\n",
        "Raised::kNone) driver->abandon();\n",
        METRICS,
    ),
    Mutation(
        "exchanges have no bytes",
        CHANNEL,
        "  for (const PeerBytes& part : sends_) span.add_bytes(part.bytes);\n",
        "",
        METRICS,
    ),
    Mutation(
        "backwards begin where they are entered, within each other",
        DRIVER,
        "backward ? std::max(began, std::exchange(backward_ns_, now)) : began",
        "backward && began == 0 ? backward_ns_ : began",
        TRACES,
    ),
    Mutation(
        "waits of lanes count as the model's",
        RECORDER,
        "event.kind == Kind::kWait && event.row == kModel",
        "event.kind == Kind::kWait",
        gtest("src/trace/trace_test", "Recorder*"),
    ),
    Mutation(
        "an error leaves no timeline",
        "src/trace/chrome.cpp",
        "if (!of.on() || of.about.folder.empty()) return",
        "if (of.on() || of.about.folder.empty()) return",
        Pytest(("tests/python/test_errors.py", "-k", "report_of_the_plans")),
    ),
    Mutation(
        "lanes take nothing from what computes",
        "src/plan/cost/pipeline_timeline.cpp",
        "    compute_ += (1.0 - overlap_) * takes;\n",
        "",
        gtest("src/plan/plan_test", "Timeline*"),
    ),
    Mutation(
        "a field of a machine's file that there is not is passed over",
        "src/plan/cost/machine.cpp",
        'if (key == "about" || value.is_null()) continue;',
        'if (key == "about" || key == "flop" || value.is_null()) continue;',
        gtest("src/plan/plan_test", "Machine*"),
    ),
    Mutation(
        "a trace counts steps that were made before a load",
        MONITOR,
        "  ++applied_;\n",
        "  applied_ = made.step;\n",
        Pytest(("tests/python/test_trace.py", "-k", "after_load")),
    ),
    Mutation(
        "a trace has no more than the lanes",
        "src/engine/watch/metrics.cpp",
        "      own += (own.empty() || more.empty()",
        "      if (more.empty()) own += (own.empty() || more.empty()",
        ranks("Metrics*"),
    ),
]
