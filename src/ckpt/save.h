#pragma once
// Save: one rank's shard of a checkpoint, from the inventory to a durable file, and what rank 0
// makes of all shards.
//
// [Note: A save] Every rank writes what it holds, and of what several hold a part each; nothing is
// gathered. A rank that has its shard on disk says so with a file beside it (its part of the
// manifest), or says why it has not; rank 0 waits for all of them, writes the manifest and renames
// the folder. So the ranks' writing threads need no connections, and a checkpoint that any of them
// did not finish is never seen.
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

// A tensor that is no part of the executor's state: a buffer, a generator's state, a piece of what
// an optimizer of the user's own keeps.
struct Extra {
  std::string role;
  Global global;      // which elements of which tensor
  int rank = -1;      // of whom it is; -1: of all
  at::Tensor tensor;  // on the CPU
};

// What is saved beside the inventory.
struct Contents {
  Json about = Json::object(), state = Json::object();  // as in Manifest
  Json front = Json::object(), of_rank = Json::object();
  std::vector<Extra> extras;
  int64_t room_bytes = 16LL << 20;  // of memory at most, through which what is on disk goes
};

class Save {
 public:
  // Draws up what this rank writes. Between steps; the executor rests.
  Save(exec::Executor& executor, mem::Tiers& tiers, int rank, std::vector<Holding> holdings,
       const GlobalOf& global_of, Contents contents);
  ~Save();

  int64_t bytes() const;  // of the shard
  // Makes the file in `folder`. Throws RuntimeFault where there is no room.
  void open(const std::string& folder);
  // What is saved is what there is now, whatever training changes from here on: see [Note: Behind
  // training's back]. Not `behind`: nothing changes until write() has ended. Compute thread.
  void capture(bool behind);
  // The rest, by any thread. Does not throw: returns the error, when it has told rank 0 of it.
  std::string write();

 private:
  class Bounce;
  // A part of a region that is being read from the swap file.
  struct Reading {
    size_t index = 0;  // of the region
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
  std::vector<Source> sources_;  // of the regions, until capture()
  std::shared_ptr<PendingWrites> pending_;
  ShardLayout layout_;
  std::string folder_;
  std::unique_ptr<ShardWriter> writer_;
  std::unique_ptr<Bounce> bounce_;
  std::deque<Reading> reading_;
};

// Rank 0, after its own write(): waits for the other ranks' parts and commits. Returns the
// checkpoint's path. Throws RuntimeFault with the first rank's error, or when a part does not come
// until it is `late`.
std::string commit(Draft& draft, int world, int keep, const std::function<bool()>& late);

}  // namespace penstock::ckpt
