#include "src/exec/norm.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/kernels.h"

namespace penstock::exec {

namespace {

constexpr size_t kTextBytes = 256;  // of the texts that name a contribution or a parameter

std::vector<Slot*> slots_of(std::vector<UnitState>& units) {
  std::vector<Slot*> slots;
  for (UnitState& unit : units) {
    for (Flat& flat : unit.flats) {
      for (Slot& slot : flat.slots) slots.push_back(&slot);
    }
  }
  return slots;
}

// Appends the sums that are on the device, and returns what each of them sums, for error texts.
std::vector<std::string> add_sums(const std::vector<UnitState>& units,
                                  std::vector<at::Tensor>* there) {
  std::vector<std::string> names;
  for (const UnitState& unit : units) {
    for (const Flat& flat : unit.flats) {
      if (!flat.sum_there.defined()) continue;
      there->push_back(flat.sum_there);
      names.push_back(flat.slots.size() == 1 ? concat("parameter \"", flat.slots.front().name, "\"")
                                             : concat("a parameter of \"", unit.name, "\""));
    }
  }
  return names;
}

// Returns whether users edited the flat's parameters since the last update, as a device scalar that
// is 0 if they did not. Returns an undefined tensor if the answer is not on the device.
at::Tensor edits_there(const Rank& rank, Flat& flat) {
  if (!rank.users_write(flat)) return {};
  const Buffer& rest = flat.rest().one();
  if (rank.edits_cross(flat)) {
    if (!flat.left.defined()) return {};
    return device::differ(flat.left, device::fingerprint(rest.data(), rest.bytes()));
  }
  const ChunkState& chunk = flat.chunks.front();
  const Buffer& master = chunk.optim.front().buffers.front();
  const Placement& updated = rank.cells.optim_update;
  if (flat.chunks.size() > 1 || chunk.optim.front().place != updated) return {};
  if (!master.memory || master.data().device == nullptr) return {};
  const int64_t begin = rank.begin_of(updated, flat) - rank.begin_of(flat.rest().place, flat);
  const Buffer& kept = rank.cells.base ? flat.base : master;
  return device::edited_on_device(kept.data(), kept.dtype, rest.at(begin), rest.dtype,
                                  rank.numel_updated(flat, chunk));
}

}  // namespace

// Reads all device scalars of the step in one read: squares, sums, edits, loss.
// In a step without offload, the host waits for the device only here.
Norm::Own Norm::look(const Update& update) {
  if (!rank_.cells.grads_stay_on_device()) arrive_on_host(rank_, gradients_);
  Own own{0.0, update.bad, false, {}, update.counted.told, {}};
  std::vector<at::Tensor> there;
  std::vector<Flat*> squared;  // flats with a scalar in `there`
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      own.squares += gradients_.own_squares(flat, gradients_.held(flat), &there);
      if (there.size() > squared.size()) squared.push_back(&flat);
    }
  }
  const size_t num_squares = there.size();
  const std::vector<std::string> suspects = add_sums(rank_.units, &there);
  const size_t num_sums = suspects.size();
  std::vector<Flat*> left;
  for (UnitState& unit : rank_.units) {
    for (Flat& flat : unit.flats) {
      flat.edited = true;
      at::Tensor edits = edits_there(rank_, flat);
      if (!edits.defined()) continue;
      there.push_back(std::move(edits));
      left.push_back(&flat);
    }
  }
  const size_t num_left = left.size();
  for (const Doubt& doubt : rank_.doubts) there.push_back(doubt.edits);
  const std::vector<Doubt> doubts = std::exchange(rank_.doubts, {});
  const size_t begin = there.size();
  own.edits = edits_.look(&there);
  const size_t end = there.size();
  if (update.counted.loss_there.defined()) there.push_back(update.counted.loss_there);
  const std::vector<double> answers = device::read(there);
  if (update.counted.loss_there.defined()) own.told.loss += answers.back();
  for (size_t i = begin; i < end; ++i) own.edits.sample += answers[i];
  for (size_t i = 0; i < num_squares; ++i) {
    own.squares +=
        std::isfinite(answers[i]) ? answers[i] * answers[i] : gradients_.exact_squares(*squared[i]);
  }
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

// Returns the lanes' histories up to the previous norm. For the current histories, this thread
// would have to wait for the work of the lanes.
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

// The first part of the payload. Then come flags, one for each parameter of all stages, so that the
// length is the same on every rank. The text of say() comes last.
struct Norm::Head {
  double squares = 0.0;
  ReplicaEdits::Facts edits;
  std::array<uint64_t, 2> history{};  // histories of the lanes
  Told told;
  Next next = Next::kStep;
  char doubt = 0;                         // 1: `bad` counts only if the total is also not finite
  std::array<char, kTextBytes> bad{};     // the first contribution that is not finite
  std::array<char, kTextBytes> edited{};  // a parameter whose edit is lost

  static Head of(const std::string& payload) {
    Head head;
    std::memcpy(&head, payload.data(), sizeof(head));
    return head;
  }
};

std::string Norm::payload_of(const Head& head, const std::string& flags, const std::string& said) {
  std::string payload(sizeof(head), '\0');
  std::memcpy(payload.data(), &head, sizeof(head));
  return payload + flags + said;
}

std::string Norm::going_on(const std::vector<UnitState>& units, Next next,
                           const std::string& said) {
  Head head;
  head.next = next;
  return payload_of(head, std::string(static_cast<size_t>(count_slots(units)), '\0'), said);
}

void Norm::compare(const std::vector<std::string>& payloads) {
  constexpr std::array<const char*, 3> kDoes = {"called step()", "began another forward",
                                                "began another backward"};
  const auto next = [&](size_t rank) { return Head::of(payloads[rank]).next; };
  const auto does = [&](size_t rank) { return kDoes[static_cast<size_t>(next(rank))]; };
  for (size_t rank = 1; rank < payloads.size(); ++rank) {
    if (next(rank) == next(0)) continue;
    throw RuntimeFault(
        concat("[exec::norm] after the last backward of the accumulation window, rank ", rank, " ",
               does(rank), " and rank 0 ", does(0),
               ". Run the same number of forwards and backwards on every rank before step()"));
  }
}

void Norm::compare_history(const std::vector<std::string>& all, const Head& mine) const {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto other = static_cast<int>(rank);
    const bool of_stage =
        rank_.mesh.coordinate(other, Axis::kPipeline) == rank_.groups.pipeline().index;
    if (!of_stage || Head::of(all[rank]).history == mine.history) continue;
    throw RuntimeFault(concat("[exec::norm] ranks ", other, " and ", rank_.group.rank(),
                              " ran different collectives on their devices in the previous step. "
                              "Their gathered parameters and summed gradients may be wrong. Load a "
                              "checkpoint"));
  }
}

Norm::Result Norm::exchange(const comm::Label& label, const Update& update) {
  const Own own = look(update);
  Head mine;
  mine.squares = own.squares;
  mine.edits = own.edits;
  mine.history = history();
  mine.told = own.told;
  mine.doubt = own.doubt ? 1 : 0;
  own.bad.copy(mine.bad.data(), kTextBytes - 1);
  own.edited.copy(mine.edited.data(), kTextBytes - 1);
  const std::vector<Slot*> slots = slots_of(rank_.units);
  std::string flags(static_cast<size_t>(rank_.num_slots), '\0');
  for (const Slot* slot : slots) {
    flags[static_cast<size_t>(slot->number)] = static_cast<char>(slot->touched);
  }
  Result made;
  std::string doubtful, edited;
  std::vector<ReplicaEdits::Facts> edits;
  PENSTOCK_ASSERT(*label.text == kLabel, "[exec::norm] the label differs from Norm::kLabel");
  std::vector<std::string> all = rank_.channels.control.share(
      label, rank_.groups.everyone(), payload_of(mine, flags, update.say()));
  compare(all);
  compare_history(all, mine);
  for (std::string& part : all) {
    const Head theirs = Head::of(part);
    made.total += theirs.squares;
    made.told.add(theirs.told);
    std::string& first = theirs.doubt == 0 ? made.bad : doubtful;
    if (first.empty()) first = theirs.bad.data();
    if (edited.empty()) edited = theirs.edited.data();
    edits.push_back(theirs.edits);
    for (Slot* slot : slots) {
      slot->touched |= part[sizeof(Head) + static_cast<size_t>(slot->number)] != 0;
      slot->had |= slot->touched;
    }
    part.erase(0, sizeof(Head) + flags.size());
  }
  if (!edited.empty()) {
    throw RuntimeFault(concat(
        "[exec::norm] parameter \"", edited,
        "\" was changed in place in a forward or backward. It is a gathered copy there, so the "
        "change would be lost. Change it inside `with engine.gathered(write=True):`"));
  }
  edits_.agree(edits);
  made.divisor = update.hear(all);
  if (made.bad.empty() && !std::isfinite(made.total)) made.bad = doubtful;
  return made;
}

}  // namespace penstock::exec
