#pragma once
// Group: the ranks that train together, as the engine sees them. Between hosts, Penstock has no
// transport of its own: a group wraps a c10d process group. Ranks on one host exchange data through
// shared memory; ranks in one process are threads.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/export.h"

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace penstock {

class Board;

namespace comm {
class DeviceBackends;
class DeviceCollectives;
}  // namespace comm

// A span of CPU memory that is sent to or received from `peer`.
struct Piece {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// Sizes of the pieces that each of `peers` sends.
struct TileSource {
  std::vector<int> peers;
  std::vector<int64_t> bytes;
};

// One tile: the same range of bytes of a piece, from every peer (in the order of `peers`).
struct Tile {
  size_t piece = 0;
  int64_t offset = 0, bytes = 0;
  std::span<const void* const> data;
};
// Size of every tile except the last tile of a piece.
inline constexpr int64_t kTileBytes = 128 << 10;
using TakeTile = std::function<void(const Tile&)>;

// A rank's position in the plan, which other ranks can read. The position is set for every
// collective, so its texts are shared and not copied. Shared ownership keeps the texts alive for a
// thread that reads them after the plan or the lane is gone.
struct PENSTOCK_API Position {
  int64_t step = 0, sequence = 0;
  std::shared_ptr<const std::string> lane;  // null: only `what` is set
  std::shared_ptr<const std::string> what;

  static Position of(std::string text);
  // "step 7, collective 12 of lane gather, `move u3 param all_gather(local)`"
  std::string text() const;
};

// Settings for reporting long and failed waits for peers.
struct WatchOptions {
  std::chrono::milliseconds warn =
      std::chrono::seconds(30);  // writes a line to stderr after this time; 0: never
  std::string report_dir;        // folder for the plan's last lines after an error; "": none
};

// A group is shared by its maker and the engine, because a lane's thread may still use it after the
// user drops it. Several lane threads may call exchange() at once.
class PENSTOCK_API Group {
 public:
  Group();
  virtual ~Group();
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends and receives all pieces; returns when all are done. Both sides of a piece use the same
  // `tag` and the same size. Exchanges in flight between the same two ranks use different tags.
  // Throws std::exception if a peer is gone or the timeout has passed.
  virtual void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                        uint32_t tag) = 0;
  // Like exchange(), but received data is not stored: `take` gets each tile while the tile is in
  // the cache. Returns false on every rank, without exchanging anything, if the group does not
  // support this.
  virtual bool exchange_tiles(const std::vector<Piece>& /*sends*/, const TileSource& /*from*/,
                              uint32_t /*tag*/, const TakeTile& /*take*/) {
    return false;
  }
  // Returns the name of the transport: "gloo", "shm", ...
  virtual std::string transport() const = 0;
  // Replaces the rank's position. Any thread may call it.
  virtual void set_position(Position position) = 0;
  // Requests the position of every rank after a failure. Returns a text that names the ranks that
  // do not answer.
  virtual std::string roll_call(const std::string& error) = 0;
  // Returns the board that `penstock status` reads; null after close() or if the group has none.
  virtual Board* board() { return nullptr; }
  // [Note: Last call] At the end of a run, the ranks synchronize once more. They use no exchanges
  // for this, so it works even after a failure.
  // [all ranks] Blocks until every rank has called last_call(). If no rank has failed, returns "".
  // Otherwise ends this rank's exchanges and returns the `fault` of the first rank that failed; the
  // caller must then call renew(). A failed rank first waits one second for the other ranks, so
  // that data in flight arrives. The failed rank then ends the exchanges of all ranks, because they
  // might otherwise block forever. The ended exchanges throw `fault`. Throws std::exception if a
  // rank is gone or does not call within the timeout.
  virtual std::string last_call(const std::string& fault) = 0;
  // Makes this rank's exchanges, including those in progress, throw `why` until renew(). Any thread
  // may call it.
  virtual void end_exchanges(const std::string& why) = 0;
  // [all ranks] Makes new connections, which no failed exchange has used. No exchange of this rank
  // may be in progress.
  virtual void renew() = 0;
  // connect_on_device() calls this function, which makes a back end for collectives on a device's
  // memory (NCCL, RCCL, XCCL) among `ranks`. These ranks make the same calls in the same order. The
  // function must be set before an engine is made. Without it, device memory is exchanged through
  // host memory.
  using DeviceGroups =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int>& ranks)>;
  void set_device_groups(DeviceGroups make) { device_groups_ = std::move(make); }
  const DeviceGroups& device_groups() const { return device_groups_; }
  // Collective over `ranks`. Connects these ranks for collectives on the memory of `device`. When
  // this rank's exchanges end, these collectives end as well. The output of a collective that is
  // aborted in progress is undefined. Throws RuntimeFault if the ranks cannot be connected in time.
  std::shared_ptr<comm::DeviceCollectives> connect_on_device(const std::vector<int>& ranks,
                                                             c10::Device device);
  // Names the device collective that was aborted in progress, if any: "step 7, collective 12 of
  // lane gather, `publish ...`".
  std::string cut_off_on_device();
  // Ends all exchanges and joins the group's threads. The engine calls it once.
  virtual void close() = 0;

  using ProcessGroups =
      std::pair<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::ProcessGroup>>;
  // `timeout` bounds every exchange. The process group must have a CPU backend (gloo) with
  // point-to-point operations and should serve only Penstock. `downward` is an optional second
  // process group over the same ranks, for data to lower ranks. With one connection per direction,
  // gloo's thread needs less processor time (docs/decisions.md). renew() calls `connect` on all
  // ranks to make two new process groups, and fails without `connect`.
  static std::shared_ptr<Group> from_process_group(
      const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
      std::chrono::milliseconds timeout,
      const c10::intrusive_ptr<c10d::ProcessGroup>& downward = {},
      std::function<ProcessGroups()> connect = {}, const WatchOptions& watch = {});
  // [all ranks] Connects the processes that torchrun, `penstock run`, mpirun or srun started on one
  // host. Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the names that MPI and Slurm use
  // for them. Returns alone() if none of them is set. Throws ConfigError if the values are invalid.
  // Throws RuntimeFault if rank 0 cannot be reached, if ranks are on several hosts, or if they
  // cannot share memory.
  static std::shared_ptr<Group> from_environment(
      std::chrono::milliseconds timeout = std::chrono::minutes(10), const WatchOptions& watch = {});
  // Makes `size` ranks in one process, one thread each.
  static std::vector<std::shared_ptr<Group>> threads(
      int size, std::chrono::milliseconds timeout = std::chrono::minutes(10),
      const WatchOptions& watch = {});
  // Makes a group of one rank.
  static std::shared_ptr<Group> alone();

 protected:
  // Ends this rank's exchanges when a peer's process ends, even if no exchange on the host is in
  // progress.
  virtual void watch_peers() {}
  // Returns how long connect_on_device() waits for the other ranks.
  virtual std::chrono::milliseconds time_to_connect() { return std::chrono::minutes(10); }
  comm::DeviceBackends& back_ends() { return *back_ends_; }

 private:
  DeviceGroups device_groups_;
  std::unique_ptr<comm::DeviceBackends> back_ends_;
};

}  // namespace penstock
