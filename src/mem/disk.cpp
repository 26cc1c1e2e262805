#include "src/mem/disk.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::mem {

namespace {

constexpr int kDepth = 64;  // requests in the ring

std::string system_text(int error) { return std::strerror(error); }

}  // namespace

struct DiskTicket::State {
  std::mutex mutex;
  std::condition_variable changed;
  int left = 0;            // requests; guarded by mutex
  int64_t progress = 0;    // requests done; guarded by mutex
  std::string error;       // the first; guarded by mutex
  std::string last_text;   // of the request that was started last
  std::string_view check;  // what was read, where its checksum is known
  uint64_t sum = 0;
};

Disk::Disk(const DiskOptions& options)
    : options_(options), io_(options.make_io ? options.make_io() : BlockIo::best(kDepth)) {
  PENSTOCK_ASSERT(!options.paths.empty() && options.stripe_bytes % kBlockBytes == 0,
                  "[mem::Disk] no path, or stripes that are not whole blocks");
  for (const std::string& folder : options.paths) open(folder);
}

Disk::~Disk() {
  io_.reset();
  for (const File& file : files_) close(file.descriptor);
}

void Disk::open(const std::string& folder) {
  std::string name = folder + "/penstock-swap-XXXXXX";
  const int created = mkstemp(name.data());
  if (created < 0) {
    throw ConfigError(concat("[mem::Disk] cannot make a swap file in \"", folder,
                             "\" (offload.path): ", system_text(errno)));
  }
  File file{folder, ::open(name.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC), true};
  if (file.descriptor < 0) {  // this file system has no direct I/O
    file.descriptor = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    file.direct = false;
  }
  const int error = errno;
  unlink(name.c_str());
  close(created);
  if (file.descriptor < 0) {
    throw RuntimeFault(concat("[mem::Disk] cannot open \"", name, "\": ", system_text(error)));
  }
  files_.push_back(file);
}

int64_t Disk::reserve(int64_t bytes) {
  return std::exchange(reserved_, reserved_ + block_padded(bytes));
}

void Disk::allocate() {
  const auto num_files = static_cast<int64_t>(files_.size());
  const int64_t round = options_.stripe_bytes * num_files;
  const int64_t end = (reserved_ + round - 1) / round * options_.stripe_bytes;
  const int64_t bytes = end - allocated_;
  for (const File& file : files_) {
    int error = 0;
    do {
      error = bytes == 0 || fallocate(file.descriptor, 0, allocated_, bytes) == 0 ? 0 : errno;
    } while (error == EINTR);
    struct statvfs system{};
    fstatvfs(file.descriptor, &system);
    const auto free = static_cast<int64_t>(system.f_bavail * system.f_frsize);
    if (error == EOPNOTSUPP || error == ENOSYS) error = free < bytes ? ENOSPC : 0;
    if (error == 0) continue;
    throw RuntimeFault(concat("[mem::Disk] \"", file.path, "\" cannot hold a swap file of ",
                              format_bytes(static_cast<double>(end)), " (",
                              format_bytes(static_cast<double>(free)),
                              " free): ", system_text(error)));
  }
  allocated_ = end;
}

std::string Disk::request_text(bool write, const File& file, int64_t offset, int64_t bytes) const {
  return concat(write ? "write" : "read", " of ", bytes, " bytes at offset ", offset,
                " of the swap file in \"", file.path, "\"");
}

DiskTicket Disk::start(bool write, int64_t offset, char* data, int64_t bytes) {
  bytes = block_padded(bytes);
  PENSTOCK_ASSERT(offset % kBlockBytes == 0 && offset + bytes <= reserved_ &&
                      reinterpret_cast<uintptr_t>(data) % kBlockBytes == 0,
                  "[mem::Disk] a request outside its extent or off its alignment");
  const auto num_files = static_cast<int64_t>(files_.size());
  const int64_t stripe = options_.stripe_bytes;
  DiskTicket ticket;
  ticket.state_ = std::make_shared<DiskTicket::State>();
  const std::shared_ptr<DiskTicket::State> state = ticket.state_;
  std::vector<BlockRequest> requests;
  for (int64_t at = offset; at < offset + bytes;) {
    const int64_t index = at / stripe;
    const int64_t size = std::min(offset + bytes, (index + 1) * stripe) - at;
    const File& file = files_[index % num_files];
    const int64_t in_file = index / num_files * stripe + at % stripe;
    BlockRequest request{file.descriptor, write, data + (at - offset), in_file, size, {}};
    const std::string text = request_text(write, file, in_file, size);
    request.done = [state, size, text](int64_t moved) {
      const std::lock_guard lock(state->mutex);
      if (moved < 0 && state->error.empty()) {
        state->error = concat(text, " failed: ", system_text(static_cast<int>(-moved)));
      } else if (moved != size && state->error.empty()) {
        state->error = concat(text, " moved only ", moved);
      }
      ++state->progress;
      --state->left;
      state->changed.notify_all();
    };
    state->last_text = text;
    requests.push_back(std::move(request));
    at += size;
  }
  state->left = static_cast<int>(requests.size());
  {
    const std::lock_guard lock(mutex_);
    (write ? bytes_written_ : bytes_read_) += bytes;
    const std::string_view content(data, static_cast<size_t>(bytes));
    const auto known = sums_.find(offset);
    if (options_.checksums && write) sums_[offset] = hash_text(content);
    if (!write && known != sums_.end()) {
      state->check = content;
      state->sum = known->second;
    }
  }
  for (BlockRequest& request : requests) io_->submit(std::move(request));
  return ticket;
}

DiskTicket Disk::read(int64_t offset, char* data, int64_t bytes) {
  return start(false, offset, data, bytes);
}

DiskTicket Disk::write(int64_t offset, const char* data, int64_t bytes) {
  return start(true, offset, const_cast<char*>(data), bytes);
}

void Disk::wait(const DiskTicket& ticket) const {
  if (!ticket.state_) return;
  DiskTicket::State& state = *ticket.state_;
  std::unique_lock lock(state.mutex);
  while (state.left > 0) {
    const int64_t before = state.progress;
    const bool moved =
        state.changed.wait_for(lock, std::chrono::duration<double>(options_.stall_s),
                               [&] { return state.left == 0 || state.progress != before; });
    if (moved) continue;
    throw RuntimeFault(concat("[mem::Disk] no progress for ", options_.stall_s, " s: the ",
                              state.last_text, " did not end"));
  }
  if (!state.error.empty()) throw RuntimeFault(concat("[mem::Disk] the ", state.error));
  if (state.check.data() != nullptr && hash_text(state.check) != state.sum) {
    throw RuntimeFault(
        concat("[mem::Disk] the ", state.last_text, " gave other bytes than were written there"));
  }
}

int64_t Disk::bytes_read() const {
  const std::lock_guard lock(mutex_);
  return bytes_read_;
}

int64_t Disk::bytes_written() const {
  const std::lock_guard lock(mutex_);
  return bytes_written_;
}

std::string Disk::describe() const {
  const bool direct =
      std::all_of(files_.begin(), files_.end(), [](const File& file) { return file.direct; });
  return concat(files_.size(), files_.size() == 1 ? " file, " : " files, ", io_->name(),
                direct ? ", O_DIRECT" : ", through the page cache");
}

}  // namespace penstock::mem
