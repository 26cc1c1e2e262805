#pragma once
// The order in which units ran in step one, and the comparison of texts between ranks.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/plan/model_desc.h"

namespace penstock::engine {

// Events of one pass. If a unit begins or ends several times, its first begin and its last end
// count.
class OrderRecord {
 public:
  void begin(int unit);
  void end(int unit);
  // Adds a visit of a tile. Such a visit contains no other units, and a tile may have several
  // visits.
  void add(const Visit& visit) { events_.push_back({visit.unit, true, visit.mark}); }
  bool has(int unit) const;
  void clear() { events_.clear(); }
  bool empty() const { return events_.empty(); }
  // Returns the visits in order. If a unit's end directly follows its begin, the unit becomes one
  // whole visit. The root and units that contain others have a begin and an end. Units that never
  // ran come last.
  std::vector<Visit> visits(int num_units) const;

 private:
  struct UnitEvent {
    int unit = 0;
    bool begins = true;
    std::optional<Mark> visit;  // set for a tile
  };
  std::vector<UnitEvent> events_;
};

std::string visits_text(const std::vector<Visit>& visits);  // one per line: "u0 begin", "u1", ...

// A collective over payloads of equal length. It returns every rank's payload, in rank order.
using Share =
    std::function<std::vector<std::string>(const std::string& label, const std::string& payload)>;
// [all ranks] Returns every rank's text, in rank order. Texts may differ in length.
std::vector<std::string> share_text(const std::string& label, const std::string& text,
                                    const Share& share);

// Returns the first line in which two texts differ, as "rank 0 has `a`, rank 1 has `b`". Returns ""
// if the texts are equal.
std::string first_difference(const std::vector<std::string>& texts_by_rank);

}  // namespace penstock::engine
