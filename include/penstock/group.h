#pragma once
// Group: the ranks that train together, as the engine sees them. Penstock invents no transport
// between hosts: a group wraps a c10d process group, or connects threads of one process.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace c10d {
class ProcessGroup;
}

namespace penstock {

// A piece of CPU memory that goes to or comes from `peer`.
struct Piece {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// Owned by whoever made it, shared with the engine (a lane thread may still use it while the user
// lets go of it). exchange() may be called from several lane threads at once.
class PENSTOCK_API Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends and receives all pieces; returns when all are done. Both sides of a piece name the same
  // `tag` and the same size; tags in flight between two ranks differ. Throws std::exception when a
  // peer is gone or the timeout has passed.
  virtual void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                        uint32_t tag) = 0;
  // Where this rank is ("step 7, move u3 param all_gather(data)"), for the others to see.
  virtual void set_position(const std::string& text) = 0;
  // After a failure: asks every rank for its position and says who does not answer.
  virtual std::string roll_call(const std::string& error) = 0;
  // No more exchanges; joins what the group started. Called once, by the engine.
  virtual void close() = 0;

  // `timeout` bounds every exchange. The process group must have a CPU backend (gloo) with
  // point-to-point operations and should serve Penstock alone.
  static std::shared_ptr<Group> from_process_group(
      const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
      std::chrono::milliseconds timeout);
  // `size` ranks in one process, one thread each.
  static std::vector<std::shared_ptr<Group>> threads(
      int size, std::chrono::milliseconds timeout = std::chrono::minutes(10));
  // A single rank.
  static std::shared_ptr<Group> alone();
};

}  // namespace penstock
