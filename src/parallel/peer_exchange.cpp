#include "src/parallel/peer_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>
#include <vector>

#include "penstock/cut.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/device.h"
#include "src/device/kernels.h"

namespace penstock::parallel {

namespace {

Dtype dtype_of(const at::Tensor& values) {
  const std::optional<Dtype> dtype = device::find_dtype(values.scalar_type());
  TORCH_CHECK(dtype.has_value(), "[parallel::Peers] values of ", values.scalar_type(),
              " cannot be summed over tensor ranks; allowed: float32, bfloat16, float16");
  return *dtype;
}

}  // namespace

Peers::Peers(std::shared_ptr<Group> group, const Members& members, const char* lane,
             const device::Device& computes)
    : group_(std::move(group)), members_(members), computes_(computes), channel_(*group_, lane) {
  if (computes_.is_host() || !group_->device_groups() || size() == 1) return;
  channel_.use(members_, group_->connect_on_device(members_.ranks, computes_.where()));
  launches_.emplace(computes_.where());
}

void Peers::check_memory(const at::Tensor& values) const {
  TORCH_CHECK(values.is_cpu() || values.device() == computes_.where(),
              "[parallel::Peers] the engine computes on ", computes_.where(),
              ", but was given values on ", values.device());
}

// Makes an exchange. On a device it takes its turn among the collectives of the lanes
// ([Note: Launch order]).
template <class Exchange>
void Peers::exchange(const ExchangeFacts& facts, const Exchange& work) {
  if (closed_) {
    throw RuntimeFault(
        "[parallel::exchange] the engine is closed, but this computation needs exchanges with "
        "other ranks");
  }
  try {
    if (watch_) watch_(facts.kind, facts.label, facts.sent);
    const auto turn = launches_ && !facts.on_host ? launches_->next() : nullptr;
    if (turn != nullptr) turn->wait();
    work();
  } catch (...) {
    fault_ = std::current_exception();
    throw;
  }
}

// Pads the values, so that every rank sums the same number of them.
at::Tensor Peers::reduce(const at::Tensor& addend, bool gathers, const comm::Label& label) {
  check_memory(addend);
  const Dtype dtype = dtype_of(addend);
  const int64_t numel = addend.numel(), shard = (numel + size() - 1) / size();
  at::Tensor values = at::zeros({shard * size()}, addend.options());
  values.narrow(0, 0, numel).copy_(addend.reshape({-1}));
  if (size() == 1 || numel == 0) return values;
  const int64_t parts = addend.is_cpu() ? size() - 1 : size();
  const at::Tensor scratch = at::empty({shard * parts}, addend.options());
  comm::ReduceBuffer buffer;
  buffer.partial = device::address_of(values, &computes_);
  buffer.scratch = device::address_of(scratch, &computes_);
  buffer.dtype = buffer.result_dtype = dtype;
  buffer.numel = values.numel();
  const auto sent = static_cast<int64_t>(values.nbytes()) / size() * (size() - 1);
  if (gathers) {
    exchange({MoveKind::kAllReduce, label, 2 * sent, addend.is_cpu()},
             [&] { channel_.all_reduce(label, members_, {buffer}); });
    return values;
  }
  const at::Tensor own = at::empty({shard}, addend.options());
  buffer.result = device::address_of(own, &computes_);
  exchange({MoveKind::kReduceScatter, label, sent, addend.is_cpu()},
           [&] { channel_.reduce_scatter(label, members_, {buffer}); });
  return own;
}

at::Tensor Peers::sum(const at::Tensor& addend, const comm::Label& label) {
  return reduce(addend, true, label).narrow(0, 0, addend.numel()).view(addend.sizes());
}

at::Tensor Peers::sum_and_cut(const at::Tensor& addend, int64_t dim, const comm::Label& label) {
  TORCH_CHECK(addend.size(dim) % size() == 0, "[parallel::Peers] size ", addend.size(dim),
              " along dim ", dim, " is not divisible by ", size(), " tensor ranks");
  const at::Tensor first = addend.movedim(dim, 0);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] /= size();
  return reduce(first, size() == 1, label).view(sizes).movedim(0, dim).contiguous();
}

// Shares may differ by one element. Every rank sends as many elements as the largest share has.
at::Tensor Peers::gather(const at::Tensor& part, int64_t dim, int64_t total,
                         const comm::Label& label) {
  check_memory(part);
  const at::Tensor first = part.movedim(dim, 0);
  const int64_t own = first.size(0);
  if (total < 0) total = own * size();
  const auto [begin, end] = share(total, rank(), size());
  TORCH_CHECK(own == end - begin, "[parallel::Peers] rank ", rank(), " of ", size(), " has ", own,
              " of ", total, " elements along dim ", dim, ", but its share is ", end - begin);
  std::vector<int64_t> sizes = first.sizes().vec();
  const int64_t each = (total + size() - 1) / size();
  sizes[0] = each * size();
  const at::Tensor full = at::empty(sizes, part.options());
  full.narrow(0, rank() * each, own).copy_(first);
  if (own < each) full.narrow(0, rank() * each + own, each - own).zero_();
  if (size() > 1 && full.numel() > 0) {
    const auto bytes = static_cast<int64_t>(full.nbytes()) / size();
    exchange({MoveKind::kAllGather, label, bytes * (size() - 1), full.is_cpu()}, [&] {
      channel_.all_gather(label, members_, {{device::address_of(full, &computes_), bytes}});
    });
  }
  if (total == each * size()) return full.movedim(0, dim).contiguous();
  std::vector<at::Tensor> shares;
  for (int other = 0; other < size(); ++other) {
    const auto [from, to] = share(total, other, size());
    shares.push_back(full.narrow(0, other * each, to - from));
  }
  return at::cat(shares).movedim(0, dim).contiguous();
}

at::Tensor Peers::all_to_all(const at::Tensor& values, int64_t cut_dim, int64_t join_dim,
                             const comm::Label& label) {
  check_memory(values);
  TORCH_CHECK(values.size(cut_dim) % size() == 0, "[parallel::Peers] size ", values.size(cut_dim),
              " along dim ", cut_dim, " is not divisible by ", size(), " ranks");
  if (size() == 1) return values.clone(at::MemoryFormat::Contiguous);
  const at::Tensor sent = at::stack(values.chunk(size(), cut_dim));
  const at::Tensor received = at::empty_like(sent);
  received.select(0, rank()).copy_(sent.select(0, rank()));
  if (sent.numel() > 0) {
    const auto bytes = static_cast<int64_t>(sent.nbytes()) / size();
    exchange({MoveKind::kAllToAll, label, bytes * (size() - 1), sent.is_cpu()}, [&] {
      channel_.all_to_all(label, members_, device::address_of(sent, &computes_),
                          device::address_of(received, &computes_), bytes);
    });
  }
  return at::cat(received.unbind(0), join_dim);
}

at::Tensor Peers::shift(const at::Tensor& values, const comm::Label& label) {
  check_memory(values);
  const at::Tensor sent = values.contiguous();
  if (size() == 1) return sent.clone();
  const at::Tensor received = at::empty_like(sent);
  if (sent.numel() == 0) return received;
  const auto bytes = static_cast<int64_t>(sent.nbytes());
  exchange({MoveKind::kShift, label, bytes, sent.is_cpu()}, [&] {
    channel_.shift(label, members_, device::address_of(sent, &computes_),
                   device::address_of(received, &computes_), bytes);
  });
  return received;
}

// The ranks exchange only hashes. Host copies of the values are made one at a time.
std::pair<int, bool> Peers::compare(const std::vector<at::Tensor>& values, const std::string& text,
                                    const std::string& other) {
  // Exchanges on a device carry no tags. The history differs between ranks that made different
  // exchanges.
  const uint64_t history = channel_.history();
  uint64_t hash = hash_text({reinterpret_cast<const char*>(&history), sizeof(history)});
  hash = hash_text(text, hash);
  for (const at::Tensor& one : values) {
    hash = hash_text(concat(one.sizes(), " ", one.scalar_type()), hash);
    if (one.layout() != at::kStrided) continue;
    const at::Tensor bytes = one.detach().cpu().contiguous();
    hash = hash_text({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}, hash);
  }
  const std::array<uint64_t, 2> mine = {hash, hash_text(other)};
  const std::vector<std::string> all = channel_.share(
      "inputs", members_, {reinterpret_cast<const char*>(mine.data()), sizeof(mine)});
  std::pair<int, bool> found = {-1, true};
  for (int peer = 1; peer < size(); ++peer) {
    const std::string& theirs = all[static_cast<size_t>(peer)];
    const bool same = theirs.compare(0, sizeof(hash), all.front(), 0, sizeof(hash)) == 0;
    if (!same && found.first < 0) found.first = peer;
    found.second &= theirs.substr(sizeof(hash)) == all.front().substr(sizeof(hash));
  }
  return found;
}

at::Tensor Peers::cut(const at::Tensor& whole, int64_t dim) const {
  const auto [begin, end] = share(whole.size(dim), rank(), size());
  return whole.narrow(dim, begin, end - begin).clone(at::MemoryFormat::Contiguous);
}

}  // namespace penstock::parallel
