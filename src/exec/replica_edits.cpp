#include "src/exec/replica_edits.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/device.h"

namespace penstock::exec {

namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
constexpr int64_t kWhole = int64_t{1} << 53;  // a double has all whole numbers up to this one
constexpr int64_t kPiece = int64_t{1} << 20;  // elements that are hashed at once
constexpr double kRounding = 1e-3;            // allowed difference, relative to a print's `size`

// Returns the values as integers of the same size.
at::Tensor bits_of(const at::Tensor& values) {
  return values.view(values.element_size() == 4 ? at::kInt : at::kShort);
}

// Returns the sum of int64 numbers, each multiplied by an odd number that depends on its index.
at::Tensor weighted(const at::Tensor& bits, int64_t first) {
  const at::Tensor places = at::arange(first, first + bits.numel(), bits.options());
  return bits.mul(places.mul(2).add(1).mul(static_cast<int64_t>(kOdd))).sum();
}

bool rests_whole(const Rank& rank, const Flat& flat) {
  return flat.rest().place == rank.whole() && flat.rest().one().memory;
}

at::Tensor values_of(const Flat& flat, const Slot& slot) {
  return device::view(flat.rest().one().at(slot.offset), flat.dtype, slot.numel);
}

}  // namespace

struct ReplicaEdits::Print {
  uint64_t bits = 0;
  double size = 0.0, sum = 0.0;  // sums of absolute values, of values with alternating signs
  int32_t here = 0;

  bool rounded(const Print& other) const {
    const double limit = kRounding * std::max(size, other.size);
    return std::abs(size - other.size) <= limit && std::abs(sum - other.sum) <= limit;
  }
};

ReplicaEdits::ReplicaEdits(Rank& rank) : rank_(rank) {
  placements_.resize(static_cast<size_t>(rank.num_slots));
  for (UnitState& unit : rank.units) {
    for (const Part& part : unit.parts()) {
      for (Slot& slot : part.flat->slots) {
        placements_[static_cast<size_t>(slot.number)] = &part.flat->placement;
        if (part.here) places_.push_back({&unit, part.flat, &slot});
      }
      const bool known = std::any_of(different_.begin(), different_.end(),
                                     [&](const auto* one) { return *one == part.flat->placement; });
      if (!known) different_.push_back(&part.flat->placement);
    }
  }
  for (const ReplicaPlace& place : places_) agreed_.push_back(place.slot->param._version());
}

uint64_t ReplicaEdits::print_of(const at::Tensor& values) {
  const device::Unseen unseen;
  const at::Tensor flat = values.detach().reshape({-1});
  uint64_t bits = kOdd;  // so that a print is never 0, which means no print
  for (int64_t at = 0; at < flat.numel(); at += kPiece) {
    const at::Tensor piece = flat.slice(0, at, std::min(at + kPiece, flat.numel()));
    bits += static_cast<uint64_t>(weighted(bits_of(piece).to(at::kLong), at).item<int64_t>());
  }
  return bits == 0 ? kOdd : bits;
}

// ---- the facts

ReplicaEdits::Facts ReplicaEdits::look(std::vector<at::Tensor>* there) {
  Facts facts;
  if (rank_.group.size() == 1) return facts;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Slot& slot = *places_[i].slot;
    const auto edits = static_cast<uint64_t>(slot.param._version() - agreed_[i]);
    facts.counted += (edits * kOdd + slot.given) * (2 * static_cast<uint64_t>(slot.number) + 1);
  }
  const device::Unseen unseen;
  const at::Tensor sum = sample();
  if (!sum.defined()) return facts;
  if (sum.is_cpu()) {
    facts.sample = sum.item<double>();
  } else {
    there->push_back(sum);
  }
  return facts;
}

// Chooses the sampled elements: at most kSamples of each parameter, at equal distances.
void ReplicaEdits::choose() {
  sampled_.clear();
  const int64_t round = turn_ / kStepsPerSample;
  for (const UnitState& unit : rank_.units) {
    for (const Flat& flat : unit.flats) {
      if (!rests_whole(rank_, flat)) continue;
      // Made in the flat's memory, because a copy to a device would block.
      const at::TensorOptions options =
          device::view(flat.rest().one().data(), flat.dtype, 1).options().dtype(at::kLong);
      std::vector<at::Tensor> elements;
      for (const Slot& slot : flat.slots) {
        const int64_t distance = std::max<int64_t>(1, (slot.numel + kSamples - 1) / kSamples);
        const int64_t first = std::min(round % distance, slot.numel);
        elements.push_back(
            at::arange(slot.offset + first, slot.offset + slot.numel, distance, options));
      }
      sampled_.emplace_back(&flat, at::cat(elements));
    }
  }
}

// Returns a whole number in double, or an undefined tensor if no parameter rests whole.
at::Tensor ReplicaEdits::sample() {
  if (!samples_) return {};
  if (turn_ % kStepsPerSample == 0) choose();
  if (sampled_.empty()) return {};
  for (const UnitState& unit : rank_.units) unit.param_ready.wait();
  std::vector<at::Tensor> picked;
  for (const auto& [flat, elements] : sampled_) {
    const at::Tensor values = device::view(flat->rest().one().data(), flat->dtype, flat->numel);
    picked.push_back(bits_of(values).index_select(0, elements));
  }
  return weighted(at::cat(picked).to(at::kLong), 0).bitwise_and(kWhole - 1).to(at::kDouble);
}

// ---- the comparison

// Returns whether two ranks hold the same parameters. If `values` is set, all of these parameters
// must also have the same values on both ranks.
bool ReplicaEdits::alike(int rank, int other, bool values) const {
  const auto stage = [this](int of) { return rank_.mesh.coordinate(of, Axis::kPipeline); };
  if (stage(rank) != stage(other)) return false;
  return !values || std::all_of(different_.begin(), different_.end(), [&](const auto* placement) {
    return placement->is_alike(rank_.mesh, rank, other);
  });
}

void ReplicaEdits::agree(const std::vector<Facts>& all) {
  bool counted = false, sampled = false;
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      const auto one = static_cast<int>(rank), two = static_cast<int>(other);
      if (alike(one, two, false)) counted |= all[rank].counted != all[other].counted;
      if (alike(one, two, true)) sampled |= all[rank].sample != all[other].sample;
    }
  }
  if (counted || sampled) compare(suspects(counted, sampled));
  settle();
}

void ReplicaEdits::settle() {
  for (size_t i = 0; i < places_.size(); ++i) {
    agreed_[i] = places_[i].slot->param._version();
    places_[i].slot->given = 0;
  }
  ++turn_;
}

// Returns one character per parameter of all stages. It is '1' if this rank edited the parameter.
// If samples differ, it is '1' for every sampled parameter, because samples do not name the edited
// one.
std::string ReplicaEdits::suspects(bool counted, bool sampled) const {
  std::string mine(static_cast<size_t>(rank_.num_slots), '0');
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto& [unit, flat, slot] = places_[i];
    const bool edited = slot->param._version() != agreed_[i] || slot->given != 0;
    if ((counted && edited) || (sampled && rests_whole(rank_, *flat))) {
      mine[static_cast<size_t>(slot->number)] = '1';
    }
  }
  return mine;
}

ReplicaEdits::Print ReplicaEdits::print(const ReplicaPlace& place) const {
  const auto& [unit, flat, slot] = place;
  Print made;
  made.here = 1;
  made.bits = slot->given;
  if (!rests_whole(rank_, *flat)) return made;
  unit->param_ready.wait();
  const device::Unseen unseen;
  const at::Tensor values = values_of(*flat, *slot);
  made.bits = print_of(values);
  for (int64_t at = 0; at < slot->numel; at += kPiece) {
    const at::Tensor piece =
        values.slice(0, at, std::min(at + kPiece, slot->numel)).to(at::kDouble);
    made.size += piece.abs().sum().item<double>();
    made.sum += piece.slice(0, 0, piece.numel(), 2).sum().item<double>() -
                piece.slice(0, 1, piece.numel(), 2).sum().item<double>();
  }
  return made;
}

void ReplicaEdits::compare(const std::string& suspects) {
  const auto share = [this](const char* label, const std::string& payload) {
    return rank_.channels.control.share(label, rank_.groups.everyone(), payload);
  };
  std::string any = suspects;
  for (const std::string& one : share("edited parameters", suspects)) {
    for (size_t i = 0; i < any.size(); ++i) any[i] = std::max(any[i], one[i]);
  }
  std::vector<size_t> numbers;
  for (size_t i = 0; i < any.size(); ++i) {
    if (any[i] == '1') numbers.push_back(i);
  }
  std::vector<Print> mine(numbers.size());
  for (const ReplicaPlace& place : places_) {
    const auto at = std::lower_bound(numbers.begin(), numbers.end(), place.slot->number);
    if (at == numbers.end() || *at != static_cast<size_t>(place.slot->number)) continue;
    mine[static_cast<size_t>(at - numbers.begin())] = print(place);
  }
  const std::vector<std::string> prints =
      share("values of edited parameters",
            {reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Print)});
  const Placement& updated = rank_.cells.optim_update;
  const bool replicated = num_shards(updated, rank_.mesh) == 1;
  const auto of = [&](size_t rank, size_t i) {
    Print one;
    std::memcpy(&one, prints[rank].data() + i * sizeof(Print), sizeof(Print));
    return one;
  };
  for (size_t i = 0; i < numbers.size(); ++i) {
    for (size_t rank = 1; rank < prints.size(); ++rank) {
      for (size_t other = 0; other < rank; ++other) {
        const Print one = of(rank, i), two = of(other, i);
        const bool both = one.here != 0 && two.here != 0;
        if (!both || one.bits == two.bits) continue;
        if (!placements_[numbers[i]]->is_alike(rank_.mesh, static_cast<int>(rank),
                                               static_cast<int>(other)))
          continue;
        if (!replicated || !one.rounded(two)) {
          refuse(numbers[i], static_cast<int>(rank), static_cast<int>(other));
        }
        samples_ = false;
      }
    }
  }
}

// [all ranks] Only ranks of the parameter's stage know its name, so the ranks exchange it.
void ReplicaEdits::refuse(size_t number, int rank, int other) {
  std::string name(256, '\0');
  for (const ReplicaPlace& place : places_) {
    if (static_cast<size_t>(place.slot->number) == number) {
      place.slot->name.copy(name.data(), name.size() - 1);
    }
  }
  for (const std::string& one :
       rank_.channels.control.share("edited parameter", rank_.groups.everyone(), name)) {
    if (name.front() == '\0') name = one;
  }
  throw RuntimeFault(concat(
      "[exec::norm] parameter \"", name.c_str(), "\" has different values on rank ", rank,
      " and rank ", other,
      ". It was changed outside the engine, or by nn.Embedding(max_norm=...) in a forward, but not "
      "in the same way on every rank. Make the same change on every rank, or change it inside "
      "`with engine.gathered(write=True):`, which takes the values of the first rank (renormalize "
      "rows there instead of using max_norm)"));
}

}  // namespace penstock::exec
