#pragma once
// The order in which units really ran in step one, and agreement of texts between ranks.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/plan/model_desc.h"

namespace penstock::engine {

// Events of one pass: a unit began (first time) or ended (last time counts).
class OrderRecord {
 public:
  void begin(int unit);
  void end(int unit);
  // A tile's visit, short and with nothing in it; there may be several.
  void add(const Visit& visit) { events_.push_back({visit.unit, true, visit.mark}); }
  bool has(int unit) const;
  void clear() { events_.clear(); }
  bool empty() const { return events_.empty(); }
  // A unit whose begin and end are neighbours is whole; the root and units with others in between
  // have a begin and an end. Units that never ran come last, whole.
  std::vector<Visit> visits(int num_units) const;

 private:
  struct UnitEvent {
    int unit = 0;
    bool begins = true;
    std::optional<Mark> visit;  // of a tile
  };
  std::vector<UnitEvent> events_;
};

std::string visits_text(const std::vector<Visit>& visits);  // "u0 begin u1 u2 u0 end"

// Every rank's text, in rank order. `share` is a collective of equally long payloads.
using Share =
    std::function<std::vector<std::string>(const std::string& label, const std::string& payload)>;
std::vector<std::string> share_text(const std::string& label, const std::string& text,
                                    const Share& share);

// The first line in which two texts differ, as "rank 0 has `a`, rank 1 has `b`"; empty when none.
std::string first_difference(const std::vector<std::string>& texts_by_rank);

}  // namespace penstock::engine
