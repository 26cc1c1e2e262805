#include "src/exec/norm.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/kernels.h"

namespace penstock::exec {

namespace {

constexpr size_t kBadBytes = 256;  // size of the text that names a non-finite contribution
constexpr char kCounts = '1', kDoubtful = '0';

std::vector<Slot*> slots_of(std::vector<UnitState>& units) {
  std::vector<Slot*> slots;
  for (UnitState& unit : units) {
    for (Flat& flat : unit.flats) {
      for (Slot& slot : flat.slots) slots.push_back(&slot);
    }
  }
  return slots;
}

}  // namespace

bool Norm::stay_on_device() const {
  return rank_.cell(Role::kGrad, Phase::kHold).tier == Tier::kDevice &&
         rank_.cell(Role::kGrad, Phase::kUpdate).tier == Tier::kDevice;
}

// Reads all device scalars of the step in one read: squares, sums, fingerprints, edit counts, loss.
// In a step without offload, the host waits for the device only here.
Norm::Own Norm::look(const Update& update) {
  if (rank_.on_accelerator() && !stay_on_device()) {
    gradients_.last_move().wait_on_host();
    rank_.tiers.computes.synchronize();  // gradients that no lane has moved
  }
  Own own{0.0, update.bad, false, {}, update.counted.told};
  std::vector<at::Tensor> there;
  std::vector<std::string> suspects;
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      own.squares += gradients_.own_squares(flat, gradients_.held(flat), &there);
    }
  }
  const size_t num_squares = there.size();
  for (const UnitState& unit : rank_.units) {
    for (const Flat& flat : unit.flats) {
      if (!flat.sum_there.defined()) continue;
      there.push_back(flat.sum_there);
      suspects.push_back(flat.slots.size() == 1
                             ? concat("parameter \"", flat.slots.front().name, "\"")
                             : concat("a parameter of \"", unit.name, "\""));
    }
  }
  const size_t num_sums = suspects.size();
  std::vector<Flat*> left;
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      flat.edited = true;
      if (!flat.left.defined() || !rank_.edits_cross(flat)) continue;
      const Buffer& rest = flat.rest().one();
      there.push_back(device::differ(flat.left, device::fingerprint(rest.data(), rest.bytes())));
      left.push_back(&flat);
    }
  }
  const size_t num_left = left.size();
  for (const Doubt& doubt : rank_.doubts) there.push_back(doubt.edits);
  const std::vector<Doubt> doubts = std::exchange(rank_.doubts, {});
  if (update.counted.loss_there.defined()) there.push_back(update.counted.loss_there);
  const std::vector<double> answers = device::read(there);
  if (update.counted.loss_there.defined()) own.told.loss += answers.back();
  for (size_t i = 0; i < num_squares; ++i) own.squares += answers[i];
  for (size_t i = 0; i < num_sums && own.bad.empty(); ++i) {
    if (std::isfinite(answers[num_squares + i])) continue;
    own.doubt = true;
    own.bad = concat(suspects[i], ", rank ", rank_.group.rank());
  }
  for (size_t i = 0; i < num_left; ++i) {
    left[i]->edited = answers[num_squares + num_sums + i] != 0.0;
  }
  for (size_t i = 0; i < doubts.size() && own.edited.empty(); ++i) {
    if (answers[num_squares + num_sums + num_left + i] != 0.0)
      own.edited = doubts[i].flat->slots.front().name;
  }
  return own;
}

// Returns the lanes' histories up to the previous norm. To read the current histories, this thread
// would have to wait for work that the lanes still do.
std::array<uint64_t, 2> Norm::history() {
  std::array<uint64_t, 2> seen{};
  if (!rank_.on_accelerator() || !rank_.group.device_groups()) return seen;
  const std::array<std::pair<device::Lane*, const comm::Channel*>, 2> lanes = {
      {{&lanes_.gather, &rank_.channels.gather}, {&lanes_.reduce, &rank_.channels.reduce}}};
  for (size_t i = 0; i < lanes.size(); ++i) {
    const auto [lane, channel] = lanes[i];
    const std::shared_ptr<Made> before = before_[i];
    if (before != nullptr) {
      before->seen.wait();
      seen[i] = before->history;
    }
    auto made = std::make_shared<Made>();
    made->seen = lane->submit([made, channel] { made->history = channel->history(); });
    before_[i] = std::move(made);
  }
  return seen;
}

// The payload has these fields: sum of squares, whether the bad contribution counts by itself, the
// text of the bad contribution, a parameter whose edit is lost, the lanes' histories, the counts,
// one flag per parameter of all stages (so that the length is the same on every rank), and the text
// of say().
Norm::Result Norm::exchange(const comm::Label& label, const Update& update) {
  const Own own = look(update);
  Result made;
  const std::vector<Slot*> slots = slots_of(rank_.units);
  constexpr size_t kBad = sizeof(double) + 1, kEdited = kBad + kBadBytes;
  constexpr size_t kHistory = kEdited + kBadBytes;
  const std::array<uint64_t, 2> mine = history();
  constexpr size_t kTold = kHistory + sizeof(mine), kFlags = kTold + sizeof(Told);
  const auto num_flags = static_cast<size_t>(rank_.num_slots);
  std::string payload(kFlags + num_flags, '\0');
  std::memcpy(payload.data(), &own.squares, sizeof(double));
  payload[sizeof(double)] = own.doubt ? kDoubtful : kCounts;
  own.bad.copy(payload.data() + kBad, kBadBytes - 1);
  own.edited.copy(payload.data() + kEdited, kBadBytes - 1);
  std::memcpy(payload.data() + kHistory, mine.data(), sizeof(mine));
  std::memcpy(payload.data() + kTold, &own.told, sizeof(Told));
  const auto flag_of = [](const Slot& slot) { return kFlags + static_cast<size_t>(slot.number); };
  for (const Slot* slot : slots) payload[flag_of(*slot)] = static_cast<char>(slot->touched);
  const size_t said = payload.size();
  payload += update.say();
  std::string doubtful, edited;
  int other = -1;
  std::vector<std::string> all;
  for (const std::string& part :
       rank_.channels.control.share(label, rank_.groups.everyone(), payload)) {
    double sum = 0.0;
    std::memcpy(&sum, part.data(), sizeof(sum));
    made.total += sum;
    Told told;
    std::memcpy(&told, part.data() + kTold, sizeof(told));
    made.told.add(told);
    std::string& first = part[sizeof(double)] == kCounts ? made.bad : doubtful;
    if (first.empty()) first = part.c_str() + kBad;
    if (edited.empty()) edited = part.c_str() + kEdited;
    const auto from = static_cast<int>(all.size());
    const bool of_stage =
        rank_.mesh.coordinate(from, Axis::kPipeline) == rank_.groups.pipeline().index;
    if (of_stage && std::memcmp(part.data() + kHistory, mine.data(), sizeof(mine)) != 0) {
      other = from;
    }
    for (Slot* slot : slots) slot->touched |= part[flag_of(*slot)] != 0;
    all.push_back(part.substr(said));
  }
  if (other >= 0) {
    throw RuntimeFault(concat("[exec::norm] rank ", other, " made other collectives than rank ",
                              rank_.group.rank(),
                              " on its device in the previous step. Their gathered parameters and "
                              "summed gradients may be wrong: load a checkpoint"));
  }
  if (!edited.empty()) {
    throw RuntimeFault(concat(
        "[exec::norm] parameter \"", edited,
        "\" was changed in place in a forward or backward. It is a gathered copy there, so the "
        "change would be lost. Change it inside `with engine.gathered(write=True):`"));
  }
  made.divisor = update.hear(all);
  if (made.bad.empty() && !std::isfinite(made.total)) made.bad = doubtful;
  return made;
}

}  // namespace penstock::exec
