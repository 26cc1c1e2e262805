#include "src/base/turns.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "src/base/text.h"

namespace penstock {

namespace {

constexpr size_t kKept = 16;                   // turns
constexpr size_t kText = 1000;                 // bytes of an error
constexpr const char* kBackward = "backward";  // the kind of a backward's turn
// Lanes on which all ranks that take part make the same collectives. Messages between stages use
// other lanes.
constexpr std::array<const char*, 5> kAlike = {"gather", "reduce", "control", "update", "stage"};
constexpr char kField = '\x1f', kLine = '\x1e';
constexpr const char* kDifference = "[comm::exchange] the ranks made different calls: ";

std::string name(int rank) { return concat("rank ", rank); }

// Says what both ranks did from turn `number` on.
std::string tell(const Standing& one, const Standing& other, int64_t number) {
  const Turn *const here = one.turn(number), *const there = other.turn(number);
  std::string text = concat(kDifference, name(one.rank), " ", here->did, ", but ", name(other.rank),
                            " ", there->did);
  for (const Standing* standing : {&one, &other}) {
    const Turn* const before = standing->turn(number - 1);
    if (before == nullptr || before->raised.empty()) continue;
    text += concat("; before that, ", name(standing->rank), " ", before->raised);
  }
  return text + ". Make the same calls on every rank, the same number of times";
}

}  // namespace

std::string Standing::text() const {
  std::string out = join({std::to_string(rank), std::to_string(begun), lane,
                          std::to_string(sequence), std::to_string(tag), collective},
                         std::string(1, kField));
  for (const Turn& turn : turns) {
    const std::string owes = turn.owes ? "1" : "0";
    out += kLine + join({turn.kind, turn.did, turn.raised, owes}, std::string(1, kField));
  }
  return out;
}

Standing Standing::parse(const std::string& text) {
  const std::vector<std::string> lines = split(text, kLine);
  const std::vector<std::string> head = split(lines.front(), kField);
  Standing made{std::stoi(head.at(0)),
                std::stoll(head.at(1)),
                {},
                head.at(2),
                std::stoll(head.at(3)),
                static_cast<uint32_t>(std::stoul(head.at(4))),
                head.at(5)};
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> fields = split(lines[i], kField);
    made.turns.push_back({fields.at(0), fields.at(1), fields.at(2), fields.at(3) == "1"});
  }
  return made;
}

const Turn* Standing::turn(int64_t number) const {
  const int64_t index = number - (begun - static_cast<int64_t>(turns.size()));
  if (index < 0 || number >= begun) return nullptr;
  return &turns[static_cast<size_t>(index)];
}

void TurnLog::begin(Turn turn) {
  const std::lock_guard lock(mutex_);
  ++begun_;
  turns_.push_back(std::move(turn));
  if (turns_.size() > kKept) turns_.pop_front();
}

void TurnLog::raised(const std::string& error, bool owes) {
  std::string kept = error.substr(0, kText);
  std::replace_if(kept.begin(), kept.end(), [](char c) { return c == kField || c == kLine; }, ' ');
  const std::lock_guard lock(mutex_);
  if (turns_.back().raised.empty()) turns_.back().raised = kept;
  turns_.back().owes |= owes;
}

void TurnLog::went_on() {
  const std::lock_guard lock(mutex_);
  turns_.back().raised.clear();
  turns_.back().owes = false;
}

Standing TurnLog::standing(int rank) const {
  const std::lock_guard lock(mutex_);
  return {rank, begun_, turns_, "", 0, 0, ""};
}

std::string difference(const Standing& asks, const Standing& own, const RankStatus& status) {
  const auto lane = std::find_if(status.lanes.begin(), status.lanes.end(), [&](const auto& one) {
    return one.name == asks.lane && one.waits;
  });
  const bool waits = lane != status.lanes.end();
  const int64_t end = std::min(asks.begun, own.begun);
  for (int64_t number = std::max<int64_t>(0, end - static_cast<int64_t>(kKept)); number < end;
       ++number) {
    const Turn *const theirs = asks.turn(number), *const ours = own.turn(number);
    if (theirs == nullptr || ours == nullptr) continue;
    if (theirs->kind != ours->kind) return tell(asks, own, number);
    // If both ranks raised the error, or if both have continued after it, no rank waits because of
    // it.
    const bool left = number + 1 == end && theirs->raised.empty() && !ours->raised.empty();
    // Without its forward this rank cannot run the backward.
    const Turn* const next = asks.turn(number + 1);
    const bool follows = ours->owes || (next != nullptr && next->kind == kBackward);
    if (!left || waits || !follows) continue;
    return concat(kDifference, name(own.rank), " ", ours->raised, "; ", name(asks.rank),
                  " raised no error and waits for ", name(own.rank), " in `", asks.collective,
                  "`. Prevent the error, or raise and catch it on every rank");
  }
  const bool alike = std::find(kAlike.begin(), kAlike.end(), asks.lane) != kAlike.end();
  if (!alike || !waits || lane->sequence != asks.sequence || lane->tag == asks.tag) return "";
  // A rank gathers a unit off plan if its order of units differs from that of step one.
  const bool off_plan = asks.collective.ends_with(kOffPlan) || lane->line.text.ends_with(kOffPlan);
  return concat(kDifference, name(asks.rank), " waits in `", asks.collective, "`, but ",
                name(own.rank), " is in `", lane->line.text, "` (both: collective ", asks.sequence,
                " of lane ", asks.lane, ", step ", lane->line.step, "). ",
                off_plan ? concat("The ranks run units in different orders, at least one of them "
                                  "not the order of step one. ",
                                  kUnequalUnits)
                         : "Make the same calls on every rank, in the same order");
}

bool is_difference(const std::string& text) { return text.starts_with(kDifference); }

}  // namespace penstock
