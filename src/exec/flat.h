#pragma once
// Flat: parameters of one unit that share dtype, trainability and cut, in one range; and UnitState,
// the copies of a unit's roles.
//
// [Note: Windows] Each parameter keeps its own StorageImpl for life. Its DataPtr is a non-owning
// window into the flat copy that computes now; freeing drops the pointer and keeps nbytes (shapes
// and views go on working) and sets the storage's access-error flag, so that reading a freed
// parameter raises an exception that names it. Setting windows is the compute thread's work alone.
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/cut.h"
#include "src/device/fence.h"
#include "src/exec/copy.h"
#include "src/mem/arena.h"
#include "src/place/placement.h"
#include "src/plan/copies.h"

namespace penstock::exec {

class Walk;

// Throws RuntimeFault for any dtype but float32, bfloat16 and float16.
Dtype dtype_of(at::ScalarType type);

// One parameter's place in its flat, in elements.
struct Slot {
  std::string name;
  at::Tensor param;
  c10::Storage window;   // that the engine gave the parameter; users may put another in its place
  uint32_t version = 0;  // of the parameter, when its window was set
  int index = 0;         // in the model
  int number = 0;        // among all slots, those of other stages too
  Cut cut{};             // what this rank has of it
  std::vector<int64_t> sizes, whole;                  // of that; of all of it
  std::vector<std::pair<int64_t, int64_t>> ranges{};  // of that along cut.dim
  int64_t offset = 0, numel = 0;
  int64_t room = 0;      // as many as the tensor rank with the most has
  int group = 0;         // optimizer parameter group
  int64_t updates = 0;   // optimizer steps taken so far
  bool arrived = false;  // its gradient came in this backward
  bool touched = false;  // got a gradient in this window; after the norm: on any rank
  bool written = false;  // the copy that backwards add to holds its contribution
  bool shown = false;    // the parameter is all of it for now (engine/wholes.h)
  bool bad = false;      // a contribution of this rank to this window was not finite
  std::string guard;     // what reading it while freed says
};

// A range of the elements of a flat that this rank updates, and what the optimizer keeps for it.
// There is one range, or as many as the plan streams from disk one after another.
struct ChunkState {
  int64_t begin = 0, numel = 0;
  // Of the optimizer, the resting one first. Buffers: the fp32 master (none where the resting
  // parameter is the master), then the moments (the first is the momentum buffer of SGD).
  std::vector<Copy> optim;
  // The chunk's part of a resting parameter and of a held gradient on disk.
  Buffer param, gradient;
};

class Flat {
 public:
  static constexpr double kUncounted = -1.0;

  Flat(Dtype dtype, bool trainable, TensorCut tensor = TensorCut::kWhole)
      : dtype(dtype), trainable(trainable), tensor(tensor) {}

  // Adds a parameter of this dtype; called before seal().
  void add(const Slot& described, const std::string& unit);
  // Pads to `num_ranks` equal shards of a multiple of 512 bytes, as many on every tensor rank.
  void seal(int num_ranks);

  // Points the parameters into `base` (a full copy), or frees them.
  void attach(device::Address base);
  void detach();
  // One of them; null frees it.
  void point(Slot& slot, device::Address base);
  // The slot's window becomes memory of its own, with its values, for those who still look at it.
  void let_go(Slot& slot);
  // What reading a parameter says after the next detach(): that its values are nowhere any more.
  void say_gone();
  // As detach(), where some parameters may still have storages of their own.
  void let_params_go();
  // Zeroes what no contribution was written to, gaps and padding included, of a full copy (a
  // device's was zeroed when it was made).
  void complete(Buffer& sum);

  Copy& rest() { return params.front(); }
  const Copy& rest() const { return params.front(); }

  // The squares are not those of what is there now.
  void uncount() {
    squares = kUncounted;
    squares_there.reset();
  }

  void free();  // gives all buffers back; the parameters must have no windows any more

  int64_t element_bytes() const { return dtype_bytes(dtype); }

  const Dtype dtype;
  const bool trainable;
  const TensorCut tensor;  // what tensor ranks have of its parameters
  int64_t numel = 0;       // padded, after seal()
  // In a pipeline: which of its ranks have the flat, ascending, and its place in the whole unit.
  std::vector<int> owners;
  int number = 0;
  std::vector<Slot> slots;

  std::vector<Copy> params;        // the resting one first
  std::vector<Copy> grads;         // those on disk for good
  int summed = 1;                  // over so many ranks, for the update that comes
  int64_t summed_since = 0;        // the backward that made the copy that backwards add to
  double squares = kUncounted;     // of the held gradient: the sum of its own part's squares
  at::Tensor squares_there;        // or a scalar on the device
  at::Tensor sum_there;            // of this rank's contributions, where that is not finite
  at::Tensor left;                 // fingerprint of the resting parameters, as the engine left them
  bool edited = true;              // they may have been written to since
  mem::Lease gradient32;           // scaled fp32 gradient, for an optimizer of the user's
  std::vector<ChunkState> chunks;  // none when frozen
};

// A flat of a unit, which may be another stage's.
struct Part {
  Flat* flat = nullptr;
  bool here = true;
};

struct UnitState {
  std::string name;
  std::vector<Flat> flats;
  std::vector<Flat> away{};           // of other ranks of the pipeline: what there is, no memory
  Copies params, grads;               // the book: where copies of it are
  bool attached = false;              // the parameters have windows
  std::vector<mem::Lease> leaving{};  // what moves in flight still read
  std::shared_ptr<Walk> gathering{};  // the last of them; keeps its memory until the unit is used
  device::Fence param_ready{};        // the last move of the parameters
  device::Fence updated{};            // the last update, publishing included

  bool trainable() const;
  // Of all stages, in the order that all ranks have.
  std::vector<Part> parts();
};

}  // namespace penstock::exec
