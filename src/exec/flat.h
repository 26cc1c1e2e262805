#pragma once
// Flat: parameters of one unit with the same dtype, trainability and placement over the model axes,
// all quantized or none, laid end to end in one buffer. UnitState: the flats of a unit and the
// copies of its roles.
//
// [Note: Windows] Each parameter keeps its own StorageImpl for life. The storage's DataPtr is a
// non-owning window into the flat copy that forward and backward currently use. Freeing a parameter
// clears the pointer and keeps nbytes, so shapes and views still work. Freeing also sets the
// storage's access-error flag, so reading a freed parameter raises an exception that names it. Only
// the model's thread sets windows.
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/cut.h"
#include "src/device/fence.h"
#include "src/exec/copy.h"
#include "src/mem/arena.h"
#include "src/place/model_placement.h"
#include "src/place/placement.h"
#include "src/plan/copies.h"

namespace penstock::exec {

class Walk;

// Throws RuntimeFault for any dtype but float32, bfloat16 and float16.
Dtype dtype_of(at::ScalarType type);

// The place of one parameter in its flat, in elements.
struct Slot {
  std::string name;
  at::Tensor param;
  c10::Storage window;   // storage that the engine gave the parameter; users may replace it
  uint32_t version = 0;  // the parameter's version counter when its window was set
  int index = 0;         // index of the parameter in ModelTree::params
  int number = 0;        // index among the slots of all stages
  Cut cut{};             // how ranks cut the parameter
  std::vector<int64_t> sizes, whole;  // sizes of this rank's part; sizes of the full tensor
  std::vector<std::pair<int64_t, int64_t>> ranges{};  // this rank's part along cut.dim
  int64_t offset = 0, numel = 0;
  int64_t room = 0;     // elements of the largest part over the ranks that cut the parameter
  int group = 0;        // optimizer parameter group
  int64_t updates = 0;  // optimizer steps taken so far
  int64_t squared = 0;  // number of those steps that updated the second moment
  // Hash of values that the user assigned since the last norm; 0: none ([Note: Edits on some
  // ranks])
  uint64_t given = 0;
  uint64_t print = 0;    // fingerprint of sampled values of its window; 0: none, as on a device
  bool arrived = false;  // the gradient arrived in this backward
  bool touched = false;  // the slot got a gradient in this window (after the norm: on any rank)
  bool had = false;      // a gradient came since zero_grad(); in torch, .grad would not be None
  bool written = false;  // its contribution is in the copy that backwards add to
  bool shown = false;    // inside gathered() the parameter is the full tensor (WholeParams)
  bool bad = false;      // a contribution of this rank to this window was not finite
  std::string guard;     // error text for a read while the parameter is freed

  bool is_cut() const { return cut.kind == TensorCut::kCut; }
};

// A gradient that is not in its flat yet. `adds`: the flat has earlier gradients of the parameter.
struct Unpacked {
  const Slot* slot = nullptr;
  at::Tensor gradient;
  bool adds = false;
};

// A range of a flat's elements, with its optimizer state. This rank updates the range. A flat has
// either one range or several, which the plan streams from disk one after another.
struct ChunkState {
  int64_t begin = 0, numel = 0;
  // Copies of the optimizer state, the resting copy first. Buffers: the fp32 master (empty if the
  // resting parameter is the master), then the moments (the first is SGD's momentum buffer).
  std::vector<Copy> optim;
  // The chunk's part of the resting parameters and of the held gradient, if they are on disk.
  Buffer param, gradient;
};

class Flat {
 public:
  static constexpr double kUncounted = -1.0;

  Flat(Dtype dtype, bool trainable, ModelPlacement placement = {}, bool quantized = false)
      : dtype(dtype), trainable(trainable), placement(std::move(placement)), quantized(quantized) {}

  // Adds a parameter of this dtype. Must be called before seal().
  void add(const Slot& described, const std::string& unit);
  // Pads the flat to `num_ranks` equal shards, each a multiple of 512 bytes. The padded size is the
  // same on every rank.
  void seal(int num_ranks);
  // Like seal(), but divides the flat into one shard for each element of `loads`, and places the
  // parameters so that each is in one shard as a whole. `num_ranks` is a multiple of the number of
  // shards. `loads`: number of elements in each shard of earlier flats; the call adds those of this
  // flat. Shards with less get more. The parameters are then in another order.
  void seal_whole(int num_ranks, std::vector<int64_t>& loads);

  // Points the windows of all parameters into `base`, a full copy.
  void attach(device::Address base);
  void detach();  // frees all parameters ([Note: Windows])
  // Points one parameter's window into `base`. If `base` is null, frees the parameter.
  void point(Slot& slot, device::Address base);
  // Takes a new fingerprint (Slot::print) of a parameter whose window the engine wrote to.
  void renew_print(Slot& slot);
  // Returns whether users wrote to the parameter: whether a sampled value of the window has changed
  // since the fingerprint was taken. A comparison with the resting shard would see only this rank's
  // part.
  bool print_differs(const Slot& slot) const;
  // Gives the slot's window its own memory with a copy of the values, for tensors that still use
  // this storage. `computes`: the device of the parameters.
  void let_go(Slot& slot, const device::Device& computes);
  // After the next detach(), the error for reading a parameter says that it no longer has values.
  void say_gone();
  // Like detach(), but skips parameters that still have their own memory.
  void let_params_go();
  // Zeroes the slots without a contribution, the gaps and the padding of a full copy. This is not
  // needed for a copy on a device, which was zeroed when it was made.
  void complete(Buffer& sum);

  Copy& rest() { return params.front(); }
  const Copy& rest() const { return params.front(); }

  // Invalidates the sum of squares after the gradient changed.
  void uncount() {
    squares = kUncounted;
    norm_there.reset();
  }

  void free();  // frees all buffers; no parameter may have a window into them

  // [Note: Residuals] A residual has memory only while it is not zero. `next`: the rounding errors
  // of this window's sums. It replaces `kept` when an update follows. Otherwise it is dropped with
  // the window.
  struct Feedback {
    Buffer kept;
    std::optional<Buffer> next;
  };
  Feedback residual;
  Buffer base;  // [Note: Deltas]

  int64_t element_bytes() const { return dtype_bytes(dtype); }

  const Dtype dtype;
  const bool trainable;
  const ModelPlacement placement;
  const bool quantized;  // rests in the table's quantized dtype ([Note: Quantized parameters])
  int64_t numel = 0;     // padded, after seal()
  int number = 0;        // index among the unit's flats of all stages
  std::vector<Slot> slots;
  int64_t attached = 0;  // number of attach() calls; selects the values that fingerprints sample

  // The bytes of the whole flat in users' files, if it will rest there. Empty after claim_params().
  std::vector<mem::FilePart> files;
  bool in_files = false;     // rests in users' files until it is first written; equal on all ranks
  std::vector<Copy> params;  // the resting copy first
  std::vector<Copy> grads;   // a copy on disk comes first and keeps its place
  int summed = 1;            // number of ranks whose gradients a `sum` line added up for the next
                             // update
  int64_t summed_since = 0;  // number of the backward that opened the sum
  double squares = kUncounted;  // sum of squares of this rank's part of the held gradient
  at::Tensor norm_there;        // the square root of that sum, as a scalar on the device
  at::Tensor sum_there;         // device scalar: sum of this rank's contributions
  // Gradients on a device that Gradients::pack() copies together.
  std::vector<Unpacked> unpacked;
  at::Tensor left;                 // fingerprint of the resting parameters after the last update
  bool edited = true;              // users may have written to the parameters since that update
  mem::Lease gradient32;           // scaled fp32 gradient for a user's optimizer
  std::vector<ChunkState> chunks;  // empty if frozen
};

// A flat of a unit. `here` is false for a flat of another stage.
struct Part {
  Flat* flat = nullptr;
  bool here = true;
};

struct UnitState {
  std::string name;
  std::vector<Flat> flats;
  std::vector<Flat> away{};  // flats of other pipeline ranks, without memory
  Copies params, grads;      // the book of copies
  // The lossy wires through which the values of the working copy came, in order. If there are none,
  // its values are those at rest.
  std::vector<Wire> codings{};
  bool attached = false;              // the parameters have windows
  std::vector<mem::Lease> leaving{};  // memory that unfinished moves still read
  std::shared_ptr<Walk> gathering{};  // the last move; keeps its memory until the unit is used
  device::Fence param_ready{};        // end of the last move of the parameters
  device::Fence updated{};            // end of the last update and its publish

  bool trainable() const;
  // Returns the flats of all stages, in the same order on every rank.
  std::vector<Part> parts();
};

}  // namespace penstock::exec
