#pragma once
// Activations: keeps what recomputed units need between their forward and their backward, on the
// tier of the table's `act hold` cell.
//
// [Note: Saved inputs] A recomputed unit keeps only its inputs. If activations are offloaded, these
// inputs leave the device. Autograd holds the function that save() returned. Each call of the
// function returns the values (with retain_graph there may be several calls). The bytes are freed
// with the graph. In between, the plan moves the inputs. It calls put_away() when the unit's
// forward has ended, and bring() during the backward of the preceding unit. With a device, the
// bytes travel on a separate stream, through pinned memory. If the plan did not expect a backward,
// the function fetches the missing values, so that backward only takes longer.
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/device/device.h"
#include "src/mem/arena.h"
#include "src/mem/extents.h"
#include "src/place/placement.h"

namespace penstock::activations {

// Only the model's thread may use this object and call the functions that save() returns. These
// functions may be destroyed on any thread and may outlive this object.
class Activations {
 public:
  explicit Activations(Tier hold, const device::Device& device = device::Device::host());

  // Call before the first save() if inputs are held on disk.
  void open_disk(const mem::DiskOptions& options);

  // Starts a forward. A tensor that several units get within one forward is kept once.
  void begin_forward();
  // Keeps the values, strides and alignment of an input that unit number `unit` is about to use.
  // The returned function gives these values. It throws RuntimeFault after close(), for I/O errors,
  // and if the tensor was changed in place before it was put away. Small tensors, parameters, and
  // tensors that are not plain stay where they are.
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  // Moves the inputs that the unit saved since the last put_away() to the tier that holds them.
  // Throws RuntimeFault if the disk is too full (the inputs then stay where they are) or if the
  // unit changed its input in place.
  void put_away(int unit, const std::string& name);
  // Starts to read the inputs that the unit's last forward saved and that are still needed.
  void bring(int unit);

  // Frees everything, in use or not.
  void close();

  int64_t peak_bytes() const;  // bytes in memory
  int64_t disk_bytes() const;
  int64_t live_bytes() const;  // bytes in memory and on disk now

 private:
  struct Store;
  struct SavedTensor;
  using Call = std::vector<std::weak_ptr<SavedTensor>>;  // inputs saved by one forward of a unit
  void settle();

  const Tier hold_;
  std::shared_ptr<Store> store_;  // shared with the entries, which may outlive the engine
  std::unordered_map<int, Call> pending_;
  std::unordered_map<int, std::vector<Call>> calls_;
  Call writing_;
  std::unordered_map<const c10::StorageImpl*, Call> seen_;  // by storage: inputs of this forward
};

}  // namespace penstock::activations
