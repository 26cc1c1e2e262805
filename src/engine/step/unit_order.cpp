#include "src/engine/step/unit_order.h"

#include <algorithm>

#include "src/base/text.h"
#include "src/plan/plan.h"

namespace penstock::engine {

bool OrderRecord::has(int unit) const {
  return std::any_of(events_.begin(), events_.end(),
                     [unit](const UnitEvent& event) { return event.unit == unit; });
}

void OrderRecord::begin(int unit) {
  if (!has(unit)) events_.push_back({unit, true, {}});
}

void OrderRecord::end(int unit) {
  begin(unit);
  events_.erase(std::remove_if(events_.begin(), events_.end(),
                               [unit](const UnitEvent& e) { return e.unit == unit && !e.begins; }),
                events_.end());
  events_.push_back({unit, false, {}});
}

std::vector<Visit> OrderRecord::visits(int num_units) const {
  std::vector<Visit> visits;
  std::vector<bool> seen(num_units, false);
  for (size_t i = 0; i < events_.size(); ++i) {
    const auto [unit, begins, visit] = events_[i];
    seen[unit] = true;
    if (visit) {
      visits.push_back({unit, *visit});
      continue;
    }
    const bool ends_next = i + 1 < events_.size() && events_[i + 1].unit == unit;
    const bool never_ends =
        std::none_of(events_.begin(), events_.end(),
                     [unit = unit](const UnitEvent& e) { return e.unit == unit && !e.begins; });
    if (begins && (ends_next || never_ends)) {
      visits.push_back({unit, Mark::kWhole});
      if (ends_next) ++i;
    } else {
      visits.push_back({unit, begins ? Mark::kBegin : Mark::kEnd});
    }
  }
  // The root encloses all units, so units that never ran go before its end.
  for (int unit = 0; unit < num_units; ++unit) {
    if (seen[unit]) continue;
    const bool root_ends = !visits.empty() && visits.back().mark == Mark::kEnd;
    visits.insert(root_ends ? visits.end() - 1 : visits.end(), {unit, Mark::kWhole});
  }
  return visits;
}

std::string visits_text(const std::vector<Visit>& visits) {
  std::vector<std::string> parts;
  for (const Visit& visit : visits) {
    parts.push_back(concat("u", visit.unit, mark_text(visit.mark)));
  }
  return join(parts, "\n");
}

// Shares the lengths first, then the texts, padded with '\0' to the longest.
std::vector<std::string> share_text(const std::string& label, const std::string& text,
                                    const Share& share) {
  std::string length = std::to_string(text.size());
  length.resize(20, ' ');
  size_t longest = 0;
  for (const std::string& other : share(label + " length", length)) {
    longest = std::max<size_t>(longest, std::stoull(other));
  }
  std::string padded = text;
  padded.resize(longest, '\0');
  std::vector<std::string> texts = share(label, padded);
  for (std::string& other : texts) other = other.c_str();
  return texts;
}

std::string first_difference(const std::vector<std::string>& texts_by_rank) {
  const std::vector<std::string> mine = split(texts_by_rank.front(), '\n');
  for (size_t rank = 1; rank < texts_by_rank.size(); ++rank) {
    if (texts_by_rank[rank] == texts_by_rank.front()) continue;
    const std::vector<std::string> theirs = split(texts_by_rank[rank], '\n');
    for (size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
      const std::string a = i < mine.size() ? mine[i] : "nothing more";
      const std::string b = i < theirs.size() ? theirs[i] : "nothing more";
      if (a != b) return concat("rank 0 has `", a, "`, rank ", rank, " has `", b, "`");
    }
  }
  return "";
}

}  // namespace penstock::engine
