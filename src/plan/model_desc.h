#pragma once
// What the planner knows of a model: its units, their sizes, and the order in which they run.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/cut.h"
#include "src/place/placement.h"

namespace penstock {

// One flat range of a unit: parameters of one dtype that all train or are all frozen, and that the
// tensor axis has alike.
struct FlatDesc {
  int64_t numel = 0;           // padded: divisible by the number of data ranks
  Dtype dtype = Dtype::kFp32;  // the dtype it computes in
  bool trainable = true;
  TensorCut tensor = TensorCut::kWhole;
  bool stages = false;  // several stages of a pipeline have it (tied weights)
  bool operator==(const FlatDesc&) const = default;
};

// How a unit is split over the tensor axis. A column
// split yields a full output from a full input and a partial input gradient; a row split a partial
// output (Megatron-LM, arXiv:1909.08053, section 3).
enum class TensorSplit : uint8_t { kNone, kColumn, kRow };

struct UnitDesc {
  std::string name;
  std::vector<FlatDesc> flats;
  TensorSplit split = TensorSplit::kNone;
  bool block = true;        // else one layer or a tile of one, which is never computed again
  bool recomputed = false;  // its forward runs again in backward, from its inputs
  int num_chunks = 1;       // in which its optimizer state passes through memory
  bool operator==(const UnitDesc&) const = default;
};

// One of the chunks in which a unit is updated.
struct Chunk {
  int index = 0, count = 1;
  bool last() const { return index + 1 == count; }
  bool operator==(const Chunk&) const = default;
};

// The chunk's elements, first and past the last, of each flat of which a rank owns `numel`. Borders
// are on disk blocks in any dtype, so the last chunks of a small flat are empty.
std::pair<int64_t, int64_t> range_of(const Chunk& chunk, int64_t numel);
inline constexpr int64_t kChunkGrain = 2048;  // elements

// `kUse` (of a backward): the unit computes and leaves no gradient yet, as what is recomputed does.
// `kGradient`: it leaves a gradient and needs no parameters.
enum class Mark : uint8_t { kWhole, kBegin, kEnd, kUse, kGradient };

// One entry of the order of a pass. Units that contain others (the root) or that stay in use until
// later have a begin and an end; the rest are whole. In a pipeline each is of a stage, and a unit
// that is in the visits of several is there in each of them (a tied embedding).
struct Visit {
  int unit = 0;
  Mark mark = Mark::kWhole;
  int stage = 0;
  bool operator==(const Visit&) const = default;
};

struct ModelDesc {
  std::vector<UnitDesc> units;
  std::vector<Visit> forward;
  std::vector<Visit> backward;
  int64_t boundary_bytes = 0;  // of what goes from a stage to the next for a micro-batch
  bool operator==(const ModelDesc&) const = default;
};

// The order assumed before step one: unit 0 is the root and encloses the others, which run in
// index order, and in reverse in backward. Without `root` all units are whole.
void assume_order(ModelDesc& model, bool root);

}  // namespace penstock
