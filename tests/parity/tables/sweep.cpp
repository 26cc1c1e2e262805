#include "tests/parity/tables/sweep.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "src/base/text.h"
#include "tests/parity/tables/children.h"

namespace penstock::tables {

namespace {

constexpr std::chrono::seconds kTimeout{60};
constexpr const char* kMark = "[outcome] ";
constexpr Kind kKinds[] = {Kind::kExact, Kind::kRefused, Kind::kBroken};

// Returns the sanitizer's report from its headline on, or "" if there is none.
std::string sanitizer_report(const std::string& output) {
  constexpr size_t kMost = 2000;
  for (const char* headline : {"AddressSanitizer: ", "LeakSanitizer: ", "runtime error: "}) {
    const size_t at = output.find(headline);
    if (at != std::string::npos) return output.substr(at, kMost);
  }
  return "";
}

std::string tail_of(const std::string& output) {
  constexpr size_t kMost = 500;
  return output.size() <= kMost ? output : output.substr(output.size() - kMost);
}

Outcome outcome_of(const Ended& ended) {
  const auto broken = [&](const std::string& how) {
    const std::string report = sanitizer_report(ended.output);
    return Outcome{Kind::kBroken,
                   report.empty() ? concat(how, "\n", tail_of(ended.output)) : report};
  };
  if (ended.timed_out) return broken(concat("timeout after ", kTimeout.count(), " s"));
  if (ended.signal != 0)
    return broken(concat("signal ", ended.signal, ", ", strsignal(ended.signal)));
  const size_t mark = ended.output.rfind(kMark);
  if (ended.status != 0 || mark == std::string::npos)
    return broken(concat("exit status ", ended.status));
  const std::string told = ended.output.substr(mark + std::strlen(kMark));
  const size_t space = told.find(' ');
  for (const Kind kind : kKinds)
    if (told.substr(0, space) == kind_name(kind))
      return {kind, std::string(trim(told.substr(space + 1)))};
  return broken("an unknown outcome");
}

}  // namespace

std::string report_line(const Outcome& outcome) {
  return concat("\n", kMark, kind_name(outcome.kind), " ", outcome.why, "\n");
}

std::vector<Outcome> sweep(const std::vector<Draw>& draws, int jobs) {
  const std::vector<Ended> all =
      run_children(static_cast<int>(draws.size()), jobs, kTimeout, [&](int index) {
        const Outcome outcome = run(draws[static_cast<size_t>(index)]);
        std::fputs(report_line(outcome).c_str(), stdout);
        return 0;
      });
  std::vector<Outcome> outcomes;
  for (const Ended& ended : all) outcomes.push_back(outcome_of(ended));
  return outcomes;
}

Summary summarize(const std::vector<Outcome>& outcomes) {
  Summary summary;
  for (const Outcome& outcome : outcomes) {
    ++summary.count[outcome.kind];
    if (outcome.kind != Kind::kExact) ++summary.groups[outcome.kind][group_of(outcome)];
  }
  return summary;
}

double Summary::exact_share() const {
  int all = 0;
  for (const auto& [kind, some] : count) all += some;
  const auto exact = count.find(Kind::kExact);
  return all == 0 || exact == count.end() ? 0 : static_cast<double>(exact->second) / all;
}

std::string Summary::text() const {
  int all = 0;
  for (const auto& [kind, some] : count) all += some;
  std::string text = concat(all, " draws\n");
  for (const Kind kind : kKinds) {
    const auto found = count.find(kind);
    const int some = found == count.end() ? 0 : found->second;
    text += concat(kind_name(kind), "\t", some, "\t", 100 * some / std::max(all, 1), "%\n");
    const auto group = groups.find(kind);
    if (group == groups.end()) continue;
    std::vector<std::pair<int, std::string>> reasons;
    for (const auto& [reason, times] : group->second) reasons.emplace_back(-times, reason);
    std::sort(reasons.begin(), reasons.end());
    for (const auto& [times, reason] : reasons) text += concat("\t", -times, "\t", reason, "\n");
  }
  return text;
}

}  // namespace penstock::tables
