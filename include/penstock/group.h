#pragma once
// Group: the ranks that train together, as the engine sees them. Penstock invents no transport
// between hosts: a group wraps a c10d process group there. Ranks of one host share memory, those of
// one process are threads.
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

// A piece of CPU memory that goes to or comes from `peer`.
struct Piece {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// From each of `peers` come pieces of these sizes.
struct TileSource {
  std::vector<int> peers;
  std::vector<int64_t> bytes;
};

// A part of the same piece from each peer, in their order.
struct Tile {
  size_t piece = 0;
  int64_t offset = 0, bytes = 0;
  std::span<const void* const> data;
};
inline constexpr int64_t kTileBytes = 128 << 10;  // of every tile but the last of a piece
using TakeTile = std::function<void(const Tile&)>;

// Where a rank is, for the others to see. Set for every collective, so it owns no text of its own:
// the texts are shared, since another thread may read them when the plan or the lane that they came
// from is gone.
struct PENSTOCK_API Position {
  int64_t step = 0, sequence = 0;
  std::shared_ptr<const std::string> lane;  // null: `what` alone says where
  std::shared_ptr<const std::string> what;

  static Position of(std::string text);
  // "step 7, collective 12 of lane gather, `move u3 param all_gather(local)`"
  std::string text() const;
};

// What is told of waits for peers, and of those that fail.
struct WatchOptions {
  std::chrono::milliseconds warn = std::chrono::seconds(30);  // a line on stderr after; 0: none
  std::string report_dir;  // where an error leaves the plan's last lines; "": nowhere
};

// Owned by whoever made it, shared with the engine (a lane thread may still use it while the user
// lets go of it). exchange() may be called from several lane threads at once.
class PENSTOCK_API Group {
 public:
  Group();
  virtual ~Group();
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends and receives all pieces; returns when all are done. Both sides of a piece name the same
  // `tag` and the same size; tags in flight between two ranks differ. Throws std::exception when a
  // peer is gone or the timeout has passed.
  virtual void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                        uint32_t tag) = 0;
  // The same, but what comes is not stored: `take` is given it while it is in the cache, tile by
  // tile. False where the group cannot, which is so on every rank; then nothing was exchanged.
  virtual bool exchange_tiles(const std::vector<Piece>& /*sends*/, const TileSource& /*from*/,
                              uint32_t /*tag*/, const TakeTile& /*take*/) {
    return false;
  }
  // How bytes travel: "gloo", "shm", ...
  virtual std::string transport() const = 0;
  // From any thread; keeps the last.
  virtual void set_position(Position position) = 0;
  // After a failure: asks every rank for its position and says who does not answer.
  virtual std::string roll_call(const std::string& error) = 0;
  // Where this rank is, for `penstock status`; none after close(), nor in groups that keep none.
  virtual Board* board() { return nullptr; }
  // [Note: Last call] What a run does last, whatever happened before, without exchanges.
  // [all ranks] Returns when every rank has called it: "" when no rank had failed, else what the
  // first of those said as `fault`; then this rank's exchanges have ended, and renew() has to
  // come. A rank that has failed waits a second for the others (what was on its way arrives); then
  // it ends the exchanges of all ranks, which throw `fault`, since they may wait for it for ever.
  // Throws std::exception when a rank is gone or did not come within the timeout.
  virtual std::string last_call(const std::string& fault) = 0;
  // From any thread: this rank's exchanges throw `why`, those under way too, until renew().
  virtual void end_exchanges(const std::string& why) = 0;
  // [all ranks] When nothing of this rank exchanges: connections that no failed exchange has used.
  virtual void renew() = 0;
  // From connect_on_device(): makes a back end with collectives on a device's memory (NCCL, RCCL,
  // XCCL) among these ranks, all of which ask in the same order. Set before an engine is made;
  // without it, what is on a device is exchanged through host memory.
  using DeviceGroups =
      std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int>& ranks)>;
  void set_device_groups(DeviceGroups make) { device_groups_ = std::move(make); }
  const DeviceGroups& device_groups() const { return device_groups_; }
  // [those ranks] Collectives among them on a device's memory. They end with this rank's exchanges:
  // where one that is under way gives up, what it would have written is undefined.
  std::shared_ptr<comm::DeviceCollectives> connect_on_device(const std::vector<int>& ranks);
  // What of it was cut off so, if anything: "step 7, collective 12 of lane gather, `publish ...`".
  std::string cut_off_on_device();
  // No more exchanges; joins what the group started. Called once, by the engine.
  virtual void close() = 0;

  using ProcessGroups =
      std::pair<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::ProcessGroup>>;
  // `timeout` bounds every exchange. The process group must have a CPU backend (gloo) with
  // point-to-point operations and should serve Penstock alone. `downward`, when there is one, is
  // another over the same ranks, for what goes to lower ranks: with a connection for
  // each direction gloo's thread takes less of the processor (benchmarks/README.md). `connect`
  // [all ranks] makes two such groups anew, for renew(), which fails without it.
  static std::shared_ptr<Group> from_process_group(
      const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
      std::chrono::milliseconds timeout,
      const c10::intrusive_ptr<c10d::ProcessGroup>& downward = {},
      std::function<ProcessGroups()> connect = {}, const WatchOptions& watch = {});
  // [all ranks] The processes that torchrun, `penstock run`, mpirun or srun started, on one host:
  // by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or what MPI and Slurm call these. alone()
  // where no launcher says anything. Throws ConfigError: what it says cannot be; RuntimeFault: no
  // rank 0 there, ranks on several hosts, or ones that cannot share memory.
  static std::shared_ptr<Group> from_environment(
      std::chrono::milliseconds timeout = std::chrono::minutes(10), const WatchOptions& watch = {});
  // `size` ranks in one process, one thread each.
  static std::vector<std::shared_ptr<Group>> threads(
      int size, std::chrono::milliseconds timeout = std::chrono::minutes(10),
      const WatchOptions& watch = {});
  // A single rank.
  static std::shared_ptr<Group> alone();

 protected:
  // Where a peer's end ends this rank's exchanges, though none may be under way on the host.
  virtual void watch_peers() {}
  comm::DeviceBackends& back_ends() { return *back_ends_; }

 private:
  DeviceGroups device_groups_;
  std::unique_ptr<comm::DeviceBackends> back_ends_;
};

}  // namespace penstock
