#pragma once
// Lets ranks of one host exchange data through shared memory. Engines use a group. torch's DDP,
// FSDP2 and torch.distributed use a c10d back end, which Python registers as "penstock"
// (python/penstock/front/registration.py).
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

// [all ranks] Connects processes of one host. They meet at `store`, which this group uses alone,
// and exchange through shared memory. If the processes cannot share memory, returns null on every
// rank, and `why_not` gives the reason. The reason is "" if the ranks are on several hosts.
PENSTOCK_API std::shared_ptr<Group> group_on_one_host(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const WatchOptions& watch,
                                                      std::string* why_not);

// [all ranks] The ranks meet at `store`, which this back end uses alone. If the ranks cannot share
// memory, returns null on every rank, and `why_not` gives the reason. Throws std::exception if a
// rank does not arrive.
//
// Supports collectives of CPU tensors of any dtype, point-to-point messages by tag, and the
// operations that torch builds from these. fp32, bf16 and fp16 are summed in fp32 in rank order and
// rounded once, so the result has the same bits on every rank. `timeout` bounds every wait for a
// peer. The end of a peer's process is noticed at once. After an error on any rank, the back end
// can no longer be used.
//
// To release a tensor, a thread needs Python's GIL. If set, `unlocked` calls its argument without
// this lock. The last owner of the back end needs `unlocked`, because the owner waits for threads
// that take the lock.
PENSTOCK_API c10::intrusive_ptr<c10d::Backend> one_host_back_end(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, std::string* why_not,
    std::function<void(const std::function<void()>&)> unlocked = {});

}  // namespace penstock
