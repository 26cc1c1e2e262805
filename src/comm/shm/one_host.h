#pragma once
// Lets ranks of one host exchange data through shared memory. Engines use a Group for this. torch's
// DDP, FSDP2 and torch.distributed use a c10d back end, which Python registers as "penstock"
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

// [all ranks] Connects processes of one host, which then exchange data through shared memory. The
// processes meet at `store`, which only this group may use. If the processes cannot share memory,
// returns null on every rank, and `why_not` gives the reason. The reason is "" if the ranks are on
// several hosts.
PENSTOCK_API std::shared_ptr<Group> group_on_one_host(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const WatchOptions& watch,
                                                      std::string* why_not);

// [all ranks] Makes the c10d back end. The ranks meet at `store`, which only this back end may use.
// If the ranks cannot share memory, returns null on every rank, and `why_not` gives the reason.
// Throws std::exception if a rank does not arrive.
//
// Supports collectives of CPU tensors of any dtype, point-to-point messages by tag, and the
// operations that torch builds from these. fp32, bf16 and fp16 are summed in fp32 in rank order and
// rounded once, so the result has the same bits on every rank. `timeout` bounds every wait for a
// peer. The end of a peer's process is noticed at once. After an error on any rank, the back end
// can no longer be used.
//
// If set, `unlocked` must call its argument without Python's GIL. The back end's destructor uses it
// to wait for the back end's threads, because these threads may need the GIL to release tensors.
PENSTOCK_API c10::intrusive_ptr<c10d::Backend> one_host_back_end(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, std::string* why_not,
    std::function<void(const std::function<void()>&)> unlocked = {});

}  // namespace penstock
