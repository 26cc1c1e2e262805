#pragma once
// Activations: stores the inputs of recomputed units from their forward to their backward. The
// table's `act hold` cell sets the tier.
//
// [Note: Saved inputs] A recomputed unit keeps only its inputs. If activations are offloaded, these
// inputs leave the device. Autograd holds the function that save() returned. Each call of the
// function returns the values (with retain_graph there may be several calls). The bytes are freed
// with the graph. In between, the plan moves the inputs. The plan calls put_away() when the unit's
// forward has ended, and bring() during the backward of the preceding unit. If the plan did not
// expect a backward, the function itself fetches the values; the only effect is that this backward
// takes longer.
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/activations/shelf.h"

namespace penstock::activations {

// Only the model's thread may use this object and call the functions that save() returns. These
// functions may be destroyed on any thread and may outlive this object.
class Activations {
 public:
  explicit Activations(Tier hold, const device::Device& device = device::Device::host());

  // Call before the first save() if inputs are held on disk.
  void open_disk(const mem::DiskOptions& options);

  // Starts a forward. If several units get the same tensor in one forward, it is kept only once.
  void begin_forward();
  // Keeps the values, strides and alignment of an input that unit number `unit` is about to use.
  // The returned function returns these values. It throws RuntimeFault after close(), for I/O
  // errors, and if the tensor was changed in place before put_away(). Small tensors, parameters,
  // and tensors without plain strided values (sparse, quantized, ...) are not moved.
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  // Moves to the tier `hold` the inputs that the unit has saved since its last put_away(). Throws
  // RuntimeFault if the disk has no room for the inputs (they then stay where they are) or if the
  // unit changed its input in place.
  void put_away(int unit, const std::string& name);
  // Starts to read the inputs that the unit's last forward saved and that are still needed.
  void bring(int unit);

  // Frees all saved inputs, even those that a backward still needs.
  void close();

  const Shelf& shelf() const { return *shelf_; }

 private:
  struct SavedTensor;
  using Call = std::vector<std::weak_ptr<SavedTensor>>;  // inputs saved by one forward of a unit
  void settle();

  const Tier hold_;
  std::shared_ptr<Shelf> shelf_;  // shared with the entries, which may outlive the engine
  std::unordered_map<int, Call> pending_;
  std::unordered_map<int, std::vector<Call>> calls_;
  Call writing_;
  std::unordered_map<const c10::StorageImpl*, Call> seen_;  // by storage: inputs of this forward
};

}  // namespace penstock::activations
