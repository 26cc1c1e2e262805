#pragma once
// Save: writes one rank's shard of a checkpoint, from the inventory to a durable file. On rank 0,
// commit() turns the shards of all ranks into a checkpoint.
//
// [Note: A save] Every rank writes the state that it holds. If several ranks hold the same values,
// each writes a part of these values. Nothing is gathered. When a rank has written its shard, it
// writes its part of the manifest to a file beside the shard. If the rank failed, it writes a file
// with the error instead. Rank 0 waits for these files, writes the manifest and renames the folder.
// So the writing threads need no connections, and a checkpoint becomes visible only if all ranks
// finished it.
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/ckpt/folder.h"
#include "src/ckpt/inventory.h"
#include "src/ckpt/pending_writes.h"
#include "src/ckpt/shard.h"
#include "src/mem/tiers.h"

namespace penstock::ckpt {

// A tensor outside the executor's state: a buffer, the state of a random generator, or a piece of
// the state of a user-supplied optimizer.
struct Extra {
  std::string role;
  Global global;      // the elements and their tensor
  int rank = -1;      // the owner; -1: all ranks
  at::Tensor tensor;  // on the CPU
};

// The data that is saved in addition to the inventory.
struct Contents {
  Json about = Json::object(), state = Json::object();  // see Manifest
  Json front = Json::object(), of_rank = Json::object();
  std::vector<Extra> extras;
  int64_t room_bytes = 16LL << 20;  // maximum size of the staging memory for state on disk
};

class Save {
 public:
  // Lists the regions that this rank writes. Call between steps, while the executor is idle.
  Save(exec::Executor& executor, mem::Tiers& tiers, int rank, std::vector<Holding> holdings,
       const GlobalOf& global_of, Contents contents);
  ~Save();

  int64_t bytes() const;  // size of the shard
  // Makes the file in `folder`. Throws RuntimeFault if there is not enough space.
  void open(const std::string& folder);
  // Captures the state to save: later changes by training are not saved ([Note: Behind training's
  // back]). If `behind` is false, training must not change the state until write() returns. Called
  // only by the model's thread.
  void capture(bool behind);
  // Writes the shard. Any thread may call it. It does not throw: it reports an error to rank 0 and
  // returns the error's text, or "".
  std::string write();

 private:
  class Bounce;
  // A part of a region that is being read from the swap file.
  struct Reading {
    size_t index = 0;  // index of the region
    int64_t at = 0, bytes = 0;
    char* room = nullptr;
    mem::DiskTicket ticket;
  };

  void add(const Holding& holding, const GlobalOf& global_of, const Mesh& mesh);
  void add(const Extra& extra);
  int tensor_of(const std::string& role, const Global& global, int rank, const char* dtype);
  static at::Tensor edits_of(const Source& source, const device::Device* where);
  void capture(Source& source, bool behind, bool* stays);
  void write_regions();
  void read_from_disk(size_t index);
  void write_what_was_read();
  void stop_reading();
  void write_from_memory(const Source& source, const Region& region, int batch);

  exec::Executor& executor_;
  mem::Tiers& tiers_;
  const int rank_;
  Contents contents_;
  std::vector<Tensor> tensors_;
  std::map<std::string, int> by_key_;
  std::vector<Region> regions_;
  std::vector<Source> sources_;  // sources of the regions, until capture()
  std::shared_ptr<PendingWrites> pending_;
  ShardLayout layout_;
  std::string folder_;
  std::unique_ptr<ShardWriter> writer_;
  std::unique_ptr<Bounce> bounce_;
  std::deque<Reading> reading_;
};

// Must be called on rank 0 after its own write(). Waits for the parts of the other ranks and
// commits the draft. Returns the path of the checkpoint. Throws RuntimeFault with the first error
// that a rank reported. Also throws RuntimeFault if a part is still missing when `late` returns
// true.
std::string commit(Draft& draft, int world, int keep, const std::function<bool()>& late);

}  // namespace penstock::ckpt
