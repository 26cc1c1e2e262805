#pragma once
// Ranks of one host that exchange through memory they share: a group for engines, and a c10d back
// end for torch's own DDP, FSDP2 and torch.distributed. In Python that is the back end "penstock"
// (python/penstock/one_host.py).
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "penstock/export.h"
#include "penstock/group.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock {

// [all ranks] Processes of one host, which meet at `store` (this group's alone) and exchange
// through memory that they share. Null where they cannot, on every rank alike, and then
// `why_not` says why: "" for ranks of several hosts, which never can.
PENSTOCK_API std::shared_ptr<Group> group_on_one_host(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const WatchOptions& watch,
                                                      std::string* why_not);

// [all ranks] They meet at `store`, which is this back end's alone. Null where they cannot share
// memory, on every rank alike, and then `why_not` says why. Throws std::exception when a rank does
// not come.
//
// Collectives of CPU tensors of any dtype, point-to-point messages by tag, and what torch makes of
// them. fp32, bf16 and fp16 are added up in fp32 and in the order of ranks, and rounded once: the
// result has the same bits on every rank. `timeout` bounds every wait for a peer; one whose process
// ends is seen at once. After an error of one of them the back end is of no more use.
//
// `unlocked`, where not empty, calls what it is given while this thread holds no lock that it takes
// to let go of a tensor (Python's): the back end's last owner waits for threads that do.
PENSTOCK_API c10::intrusive_ptr<c10d::Backend> one_host_back_end(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, std::string* why_not,
    std::function<void(const std::function<void()>&)> unlocked = {});

}  // namespace penstock
