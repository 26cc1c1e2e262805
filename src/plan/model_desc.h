#pragma once
// The planner's description of a model: its units, their sizes, and the order in which they run.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/place/model_placement.h"
#include "src/place/placement.h"

namespace penstock {

// One flat of a unit. Its parameters have the same dtype and the same placement over the model
// axes, all train or all are frozen, and all or none are quantized.
struct FlatDesc {
  int64_t numel = 0;           // padded to a multiple of the number of data ranks
  Dtype dtype = Dtype::kFp32;  // the compute dtype
  bool trainable = true;
  ModelPlacement placement{};
  bool quantized = false;  // rests in the table's quantized dtype
  bool operator==(const FlatDesc&) const = default;
};

// One exchange that layers of a unit make with the ranks that compute the unit together. Computing
// waits for it.
struct LayerExchange {
  MoveKind kind = MoveKind::kAllReduce;
  Axis axis = Axis::kTensor;
  int64_t sent = 0;          // bytes that this rank sends
  std::string text() const;  // "all_reduce(tensor)"
  bool operator==(const LayerExchange&) const = default;
};

// The memory of tensors that the engine does not allocate, from one event of a unit to the next:
// the most bytes beyond those at the beginning, and the difference between end and beginning.
struct TensorStretch {
  int64_t over = 0, change = 0;
  bool operator==(const TensorStretch&) const = default;
};

// The stretches that end when the unit's forward or backward begins or ends. All are 0 until step
// two has shown them ([Note: Memory of activations]).
struct UnitTensors {
  TensorStretch forward_begin, forward_end, backward_begin, backward_end;
  bool operator==(const UnitTensors&) const = default;
};

struct UnitDesc {
  std::string name;
  std::vector<FlatDesc> flats;
  bool block = true;        // false: one layer or a tile, which is never recomputed
  bool recomputed = false;  // its forward runs again in backward, from its inputs
  bool kept = false;        // stays whole between forwards (offload.keep_bytes)
  int num_chunks = 1;       // number of chunks in which its optimizer state passes through memory
  // The exchanges of one forward and of one backward, in order. If the forward runs again in
  // backward, the exchanges of that second run are in `in_backward`. Empty until step one has shown
  // them.
  std::vector<LayerExchange> in_forward{}, in_backward{};
  UnitTensors tensors{};  // of one micro-batch
  bool operator==(const UnitDesc&) const = default;
};

// One of the chunks in which a unit is updated.
struct Chunk {
  int index = 0, count = 1;
  bool last() const { return index + 1 == count; }
  bool operator==(const Chunk&) const = default;
};

// Returns the chunk's range [begin, end) among the `numel` elements that a rank owns of a flat. In
// every dtype, a chunk begins and ends at a boundary of disk blocks. If a flat is too small for
// this number of chunks, the last chunks are empty.
std::pair<int64_t, int64_t> range_of(const Chunk& chunk, int64_t numel);
inline constexpr int64_t kChunkGrain = 2048;  // elements

// `kUse` (backward only): the unit computes, but its gradient does not exist yet (for example, when
// the unit is recomputed). `kGradient`: the unit produces its gradient and needs no parameters.
// `kInputs` and `kWeights`: the two parts of a split backward (BackwardPart). A planner writes them
// in place of the other marks.
enum class Mark : uint8_t { kWhole, kBegin, kEnd, kUse, kGradient, kInputs, kWeights };
// Returns whether a backward visit with this mark, which is not `kBegin`, produces a gradient.
inline bool gives_gradient(Mark mark) { return mark != Mark::kUse && mark != Mark::kInputs; }

// One entry in the order of a forward or backward. Units that contain others (the root) or that
// stay in use have a `kBegin` and a `kEnd` visit. All other units have `kWhole` visits. In a
// pipeline each visit belongs to one stage. A unit that several stages visit (a tied embedding)
// exists in each of them.
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
  int64_t boundary_bytes = 0;  // bytes sent between two stages for one micro-batch
  // True: the tier `device` is an accelerator's memory. False: it is host memory, like the tier
  // `host`.
  bool on_accelerator = false;
  bool operator==(const ModelDesc&) const = default;
};

// Sets the order that is assumed before step one: unit 0 is the root and encloses all other units,
// which run in index order in forward and in reverse order in backward. If `root` is false, unit 0
// encloses nothing, and all visits are `kWhole`.
void assume_order(ModelDesc& model, bool root);

}  // namespace penstock
