#pragma once
// Activations: what recomputed units need again between their forward and their backward, on the
// tier of the table's `act hold` cell.
//
// [Note: Saved inputs] A recomputed unit keeps its inputs alone, and where activations are
// offloaded not those either: autograd keeps what save() returned, which gives the values back any
// number of times (retain_graph) and lets the bytes go when the graph does. In between the plan
// moves them: put_away() when the unit's forward has ended, bring() one unit ahead of its backward.
// Beside a device the bytes travel on a stream of their own, through pinned memory. A plan that did
// not foresee a unit costs time only: the function fetches what is not there.
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

// Compute thread only. What save() returned may be called there and may be destroyed on any thread,
// also after this object.
class Activations {
 public:
  explicit Activations(Tier hold, const device::Device& device = device::Device::host());

  // Before the first save() where they are held on disk.
  void open_disk(const mem::DiskOptions& options);

  // A forward begins. Within one forward, what several units are given is kept once.
  void begin_forward();
  // Keeps the values, strides and alignment of what unit number `unit` is about to compute on. The
  // function throws RuntimeFault after close(), for I/O errors, and when the tensor was changed in
  // place before it was put away. Small tensors, parameters and what is no plain tensor stay where
  // they are.
  std::function<at::Tensor()> save(int unit, const at::Tensor& input);
  // What the unit saved since goes to its tier, where this unit's writes follow the last one's.
  // Throws RuntimeFault when the disk is too full (nothing is lost: it stays where it is) and when
  // the unit changed its input in place.
  void put_away(int unit, const std::string& name);
  // Starts to read what the unit's last forward saved that is still wanted.
  void bring(int unit);

  // Lets everything go, in use or not.
  void close();

  int64_t peak_bytes() const;  // in memory
  int64_t disk_bytes() const;
  int64_t live_bytes() const;  // in memory and on disk now

 private:
  struct Store;
  struct SavedTensor;
  using Call = std::vector<std::weak_ptr<SavedTensor>>;  // what one forward of a unit saved
  void settle();

  const Tier hold_;
  std::shared_ptr<Store> store_;  // with the entries, which may outlive the engine
  std::unordered_map<int, Call> pending_;
  std::unordered_map<int, std::vector<Call>> calls_;
  Call writing_;
  std::unordered_map<const c10::StorageImpl*, Call> seen_;  // in this forward
};

}  // namespace penstock::activations
