#include "src/mem/disk_tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/mem/available_memory.h"
#include "src/mem/keep_until_exit.h"
#include "src/mem/swap_file.h"

namespace penstock::mem {

namespace {

constexpr int kDepth = 64;  // requests in the ring
// A wait is divided into this many slices. It stalls if all slices end without progress. If a
// process is stopped, the whole stop counts as one slice, however long it is.
constexpr int kSlices = 8;
constexpr int kTries = 100;      // a request fails after this many submissions that move no bytes
constexpr int kFileThreads = 4;  // read users' files
// Extents of users' files begin here, each at a multiple of kExtentBytes.
constexpr int64_t kFirstFileExtent = int64_t{1} << 62;
constexpr int64_t kExtentBytes = int64_t{1} << 44;

using Clock = std::chrono::steady_clock;

// Returns the checksum of each block. No checksum is 0.
std::vector<uint64_t> sums_of(std::string_view content) {
  std::vector<uint64_t> sums;
  for (size_t at = 0; at < content.size(); at += kBlockBytes)
    sums.push_back(std::max<uint64_t>(1, hash_text(content.substr(at, kBlockBytes))));
  return sums;
}

// Returns whether the content matches all known checksums.
bool matches(std::string_view content, const std::vector<uint64_t>& known) {
  const std::vector<uint64_t> sums = sums_of(content);
  return std::equal(sums.begin(), sums.end(), known.begin(), known.end(),
                    [](uint64_t sum, uint64_t wanted) { return wanted == 0 || sum == wanted; });
}

}  // namespace

struct DiskTicket::Impl {      // guarded by the disk's mutex
  int left = 0;                // number of unfinished requests
  std::string error;           // the first error
  std::string_view check;      // bytes that are read and have known checksums
  std::vector<uint64_t> sums;  // checksum of each block of `check`; 0: not known
};

struct Disk::Impl {
  struct Request {  // at most one stripe
    std::shared_ptr<DiskTicket::Impl> ticket;
    std::string_view place;  // the folder of the swap file, or the path of a user's file
    bool in_swap_file = true;
    BlockIo* io = nullptr;
    int cached = -1;  // descriptor that goes through the page cache, for a file that bypasses it
    BlockRequest whole;
    int64_t moved = 0;
    int tries = 0;
    Clock::time_point since;
    trace::Text line;  // the plan line that made the request
    std::list<Request>::iterator self;

    std::string text() const {
      return concat(whole.write ? "write" : "read", " of ", whole.bytes, " bytes at offset ",
                    whole.offset, in_swap_file ? " of the swap file in \"" : " of \"", place, "\"");
    }
  };

  explicit Impl(const DiskOptions& options);
  DiskTicket start(bool write, int64_t offset, char* data, int64_t bytes);
  DiskTicket read_files(int64_t offset, char* data, int64_t bytes);
  void choose_cache();  // sets around_cache
  // Requires the mutex.
  Request* add(const std::shared_ptr<DiskTicket::Impl>& ticket, BlockRequest whole,
               std::string_view place);
  void allocate();
  void submit(Request& request);
  void ended(Request& request, int64_t result);
  void record(const Request& request) const;
  std::string problem(Request& request, int64_t result) const;
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done);
  std::string stall_text(const DiskTicket::Impl* ticket) const;

  const DiskOptions options;
  std::vector<SwapFile> files;
  // Descriptors of users' files that bypass the page cache, by FilePart::file. Guarded by mutex.
  std::map<int, std::shared_ptr<const int>> around_cache;
  std::once_flag cache_chosen;                // choose_cache() has run
  std::deque<std::vector<FilePart>> adopted;  // guarded by mutex; extents of users' files
  std::atomic<int64_t> reserved = 0, adopted_bytes = 0;
  std::mutex claiming;  // held by claim() and allocate()
  int64_t claimed = 0;  // guarded by claiming; bytes of each file
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Request> in_flight;  // guarded by mutex
  int64_t progress = 0;          // guarded by mutex; counts results
  bool stalled = false;          // guarded by mutex; stays true until the next progress
  int64_t bytes_read = 0, bytes_written = 0;  // guarded by mutex
  Board* board = nullptr;
  int lane = -1;                 // the disk's lane on the board
  int num_waits = 0;             // guarded by mutex; if there are several waits, the board shows
                                 // the first
  int64_t shown_waits = 0;       // guarded by mutex
  Clock::time_point busy_since;  // guarded by mutex; valid while a request is in flight
  Clock::duration busy{};        // guarded by mutex; time up to busy_since
  const trace::Text read_text = std::make_shared<const std::string>("read");
  const trace::Text write_text = std::make_shared<const std::string>("write");
  std::vector<uint64_t> sums;        // guarded by mutex; one per block, 0: not known
  std::unique_ptr<BlockIo> file_io;  // reads users' files; null: none
  std::unique_ptr<BlockIo> io;       // last members, so that their threads end first
};

Disk::Impl::Impl(const DiskOptions& options)
    : options(options), io(options.make_io ? options.make_io() : BlockIo::best(kDepth)) {
  PENSTOCK_ASSERT(!options.paths.empty() && options.stripe_bytes % kBlockBytes == 0,
                  "[mem::Disk] no path, or stripes that are not whole blocks");
  for (const std::string& folder : options.paths) files.push_back(SwapFile::open(folder));
}

DiskTicket Disk::Impl::start(bool write, int64_t offset, char* data, int64_t bytes) {
  PENSTOCK_ASSERT(offset % kBlockBytes == 0 && offset + bytes <= reserved &&
                      reinterpret_cast<uintptr_t>(data) % kBlockBytes == 0,
                  "[mem::Disk] a request is outside its extent or misaligned");
  DiskTicket ticket;
  ticket.state_ = std::make_shared<DiskTicket::Impl>();
  const auto num_files = static_cast<int64_t>(files.size());
  const int64_t stripe = options.stripe_bytes;
  const std::string_view content(data, static_cast<size_t>(bytes));
  std::vector<uint64_t> written;
  if (options.checksums && write) written = sums_of(content);
  std::vector<Request*> started;
  {
    const std::lock_guard lock(mutex);
    if (options.checksums) {
      sums.resize(reserved / kBlockBytes);
      const auto at = sums.begin() + offset / kBlockBytes;
      std::copy(written.begin(), written.end(), at);
      if (!write) {
        ticket.state_->check = content;
        ticket.state_->sums.assign(at, at + bytes / kBlockBytes);
      }
    }
    for (int64_t at = offset; at < offset + bytes;) {
      const int64_t index = at / stripe;
      const int64_t size = std::min(offset + bytes, (index + 1) * stripe) - at;
      const SwapFile& file = files[index % num_files];
      started.push_back(add(ticket.state_,
                            {file.descriptor(),
                             write,
                             data + (at - offset),
                             index / num_files * stripe + at % stripe,
                             size,
                             {}},
                            file.folder()));
      started.back()->io = io.get();
      at += size;
    }
  }
  for (Request* request : started) submit(*request);
  return ticket;
}

Disk::Impl::Request* Disk::Impl::add(const std::shared_ptr<DiskTicket::Impl>& ticket,
                                     BlockRequest whole, std::string_view place) {
  if (in_flight.empty()) busy_since = Clock::now();
  const trace::Text& line = trace::Recorder::line_here();
  in_flight.emplace_back();
  Request& request = in_flight.back();
  request.self = std::prev(in_flight.end());
  request.ticket = ticket;
  request.place = place;
  request.line = line ? line : whole.write ? write_text : read_text;
  request.whole = std::move(whole);
  request.since = Clock::now();
  ++ticket->left;
  return &request;
}

// Returns a descriptor that bypasses the page cache, or null if the file system has none.
std::shared_ptr<const int> reopened(int file) {
  const int direct =
      ::open(concat("/proc/self/fd/", file).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (direct < 0) return nullptr;
  return {new int(direct), [](const int* one) {
            ::close(*one);
            delete one;
          }};
}

void Disk::Impl::choose_cache() {
  std::map<int, int64_t> sizes;
  {
    const std::lock_guard lock(mutex);
    for (const std::vector<FilePart>& extent : adopted) {
      for (const FilePart& part : extent) {
        struct stat found{};
        if (::fstat(part.file, &found) == 0) sizes[part.file] = found.st_size;
      }
    }
  }
  int64_t sum = 0;
  for (const auto& [file, size] : sizes) sum += size;
  if (options.cache_files ? *options.cache_files : sum <= free_host_bytes() / 2) return;
  std::map<int, std::shared_ptr<const int>> found;
  for (const auto& [file, size] : sizes) {
    if (auto direct = reopened(file)) found.emplace(file, std::move(direct));
  }
  const std::lock_guard lock(mutex);
  around_cache = std::move(found);
}

DiskTicket Disk::Impl::read_files(int64_t offset, char* data, int64_t bytes) {
  const std::vector<FilePart>* parts = nullptr;
  {
    const std::lock_guard lock(mutex);
    parts = &adopted.at(static_cast<size_t>((offset - kFirstFileExtent) / kExtentBytes));
  }
  std::call_once(cache_chosen, [this] { choose_cache(); });
  for (const FilePart& part : *parts) part.check();  // before any request counts as in flight
  const int64_t begin = (offset - kFirstFileExtent) % kExtentBytes, end = begin + bytes;
  DiskTicket ticket;
  ticket.state_ = std::make_shared<DiskTicket::Impl>();
  std::vector<Request*> started;
  int64_t filled = begin;
  for (const FilePart& part : *parts) {
    const int64_t first = std::max(begin, part.at), last = std::min(end, part.at + part.bytes);
    if (first >= last) continue;
    std::memset(data + (filled - begin), 0, static_cast<size_t>(first - filled));
    filled = last;
    const std::lock_guard lock(mutex);
    const auto around = around_cache.find(part.file);
    const bool direct = around != around_cache.end();
    for (int64_t at = first; at < last;) {
      const int64_t size = std::min(last - at, options.stripe_bytes);
      started.push_back(add(ticket.state_,
                            {direct ? *around->second : part.file,
                             false,
                             data + (at - begin),
                             part.offset + (at - part.at),
                             size,
                             {},
                             direct},
                            part.path));
      started.back()->in_swap_file = false;
      started.back()->io = file_io.get();
      started.back()->cached = part.file;
      at += size;
    }
  }
  std::memset(data + (filled - begin), 0, static_cast<size_t>(end - filled));
  for (Request* request : started) submit(*request);
  return ticket;
}

// Call without holding the mutex, because the request may end before this function returns.
void Disk::Impl::submit(Request& request) {
  const BlockRequest& whole = request.whole;
  const int64_t moved = request.moved;
  request.io->submit(
      {whole.file, whole.write, whole.data + moved, whole.offset + moved, whole.bytes - moved,
       [this, &request](int64_t result) { ended(request, result); }, whole.any_offset});
}

void Disk::Impl::ended(Request& request, int64_t result) {
  std::unique_lock lock(mutex);
  ++progress;
  stalled = false;
  changed.notify_all();
  if (result == -EINVAL && request.whole.any_offset) {  // the file system needs another alignment
    request.whole.any_offset = false;
    request.whole.file = request.cached;
    lock.unlock();
    return submit(request);
  }
  const int64_t left = request.whole.bytes - request.moved;
  // In swap files the rest begins at a whole block, as O_DIRECT requires.
  const int64_t unit = request.in_swap_file ? kBlockBytes : 1;
  const int64_t whole = result < left ? result / unit * unit : left;
  if (whole > 0) request.moved += whole;
  request.tries = whole > 0 ? 0 : request.tries + 1;
  std::string error = problem(request, result);
  if (error.empty() && whole < left) {
    lock.unlock();
    return submit(request);
  }
  DiskTicket::Impl& ticket = *request.ticket;
  if (ticket.check.data() != nullptr && ticket.left == 1 && ticket.error.empty()) {
    lock.unlock();  // this was the ticket's last request, so no other thread uses it
    const bool same = matches(ticket.check, ticket.sums);
    lock.lock();
    if (error.empty() && !same)
      error = request.text() + " returned bytes that differ from the bytes written there";
    changed.notify_all();
  }
  if (ticket.error.empty()) ticket.error = error;
  --ticket.left;
  (request.whole.write ? bytes_written : bytes_read) += request.moved;
  record(request);
  in_flight.erase(request.self);
  if (in_flight.empty()) busy += Clock::now() - busy_since;
}

void Disk::Impl::record(const Request& request) const {
  if (!options.recorder || !options.recorder->on()) return;
  const auto since =
      std::chrono::duration_cast<std::chrono::nanoseconds>(request.since.time_since_epoch());
  options.recorder->add({since.count(), trace::now_ns(), 0, request.moved, 0, request.line,
                         trace::Recorder::kDisk,
                         request.whole.write ? trace::Kind::kWrite : trace::Kind::kRead});
}

std::string Disk::Impl::problem(Request& request, int64_t result) const {
  const std::string after = concat(" after ", request.moved, " of them");
  if (result < 0 && result != -EINTR && result != -EAGAIN) {
    return concat(request.text(), " failed", request.moved > 0 ? after : "", ": ",
                  std::strerror(static_cast<int>(-result)));
  }
  if (result == 0 && !request.whole.write) {
    return concat(request.text(), " reached the end of the file", after);
  }
  if (request.tries < kTries) return "";
  return concat(request.text(), " made no progress in ", kTries, " tries", after);
}

// Blocks until done() is true and returns true, or returns false if the disk stalls.
bool Disk::Impl::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done) {
  const std::chrono::duration<double> slice(options.stall_s / kSlices);
  int quiet = stalled ? kSlices - 1 : 0;
  const bool shown = board != nullptr && !done();
  if (shown && num_waits++ == 0) {
    board->wait_begins(lane, {0, ++shown_waits, 0},
                       in_flight.empty() ? "a request" : in_flight.front().text());
  }
  while (!done() && quiet < kSlices) {
    const int64_t before = progress;
    const bool moved = changed.wait_for(lock, slice, [&] { return done() || progress != before; });
    quiet = moved ? 0 : quiet + 1;
  }
  if (shown && --num_waits == 0) board->wait_ends(lane);
  stalled |= quiet == kSlices;
  return done();
}

// Describes the oldest request of this ticket, or of all tickets.
std::string Disk::Impl::stall_text(const DiskTicket::Impl* ticket) const {
  const auto oldest = std::find_if(in_flight.begin(), in_flight.end(), [&](const Request& request) {
    return ticket == nullptr || request.ticket.get() == ticket;
  });
  const std::chrono::duration<double> age = Clock::now() - oldest->since;
  return concat("[mem::Disk] no progress for ", options.stall_s, " s (offload.timeout_s): the ",
                oldest->text(), " was started ", age.count(), " s ago and has not finished");
}

Disk::Disk(const DiskOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Disk::~Disk() {
  // Joining the threads would hang, so the threads and files stay alive for the hanging requests.
  if (!end().empty()) keep_for_good(std::move(impl_));
}

int64_t Disk::reserve(int64_t bytes) { return impl_->reserved.fetch_add(block_padded(bytes)); }

int64_t Disk::claim(int64_t bytes) {
  const std::lock_guard lock(impl_->claiming);
  const int64_t offset = reserve(bytes);
  try {
    impl_->allocate();
  } catch (...) {
    impl_->reserved = offset;
    throw;
  }
  return offset;
}

void Disk::allocate() {
  const std::lock_guard lock(impl_->claiming);
  impl_->allocate();
}

// Call with `claiming` held.
void Disk::Impl::allocate() {
  const int64_t stripe = options.stripe_bytes;
  const int64_t round = stripe * static_cast<int64_t>(files.size());
  const int64_t bytes = (reserved + round - 1) / round * stripe;
  for (const SwapFile& file : files) file.claim(claimed, bytes);
  claimed = bytes;
}

int64_t Disk::adopt(std::vector<FilePart> parts) {
  int64_t end = 0;
  for (const FilePart& part : parts) {
    PENSTOCK_ASSERT(part.at >= end, "[mem::Disk] parts of files overlap or are not in order");
    end = part.at + part.bytes;
  }
  if (!impl_->file_io) impl_->file_io = BlockIo::threads(kFileThreads);
  const std::lock_guard lock(impl_->mutex);
  const auto number = static_cast<int64_t>(impl_->adopted.size());
  PENSTOCK_ASSERT(end <= kExtentBytes && number < kFirstFileExtent / kExtentBytes,
                  "[mem::Disk] an extent of users' files is too large, or there are too many");
  for (const FilePart& part : parts) impl_->adopted_bytes += part.bytes;
  impl_->adopted.push_back(std::move(parts));
  return kFirstFileExtent + number * kExtentBytes;
}

int64_t Disk::held() const { return impl_->reserved + impl_->adopted_bytes; }

bool Disk::is_read_only(int64_t offset) { return offset >= kFirstFileExtent; }

DiskTicket Disk::read(int64_t offset, char* data, int64_t bytes) {
  if (is_read_only(offset)) return impl_->read_files(offset, data, block_padded(bytes));
  return impl_->start(false, offset, data, block_padded(bytes));
}

DiskTicket Disk::write(int64_t offset, const char* data, int64_t bytes) {
  return impl_->start(true, offset, const_cast<char*>(data), block_padded(bytes));
}

void Disk::wait(const DiskTicket& ticket) const {
  if (!ticket.state_) return;
  const DiskTicket::Impl& state = *ticket.state_;
  std::unique_lock lock(impl_->mutex);
  static const auto kWaits = std::make_shared<const std::string>("disk");
  const trace::Span waits(state.left == 0 ? nullptr : impl_->options.recorder.get(),
                          trace::Kind::kWait, kWaits, 0, trace::Recorder::kDisk);
  if (!impl_->wait(lock, [&] { return state.left == 0; })) {
    throw RuntimeFault(impl_->stall_text(&state));
  }
  lock.unlock();  // nothing changes the ticket any more
  if (!state.error.empty()) throw RuntimeFault(concat("[mem::Disk] the ", state.error));
}

bool Disk::done(const DiskTicket& ticket) const {
  if (!ticket.state_) return true;
  const std::lock_guard lock(impl_->mutex);
  return ticket.state_->left == 0;
}

void Disk::show_on(Board* board) {
  impl_->board = board;
  if (board != nullptr) impl_->lane = board->lane(kDiskLane);
}

void Disk::wait_for_all() const {
  std::unique_lock lock(impl_->mutex);
  if (impl_->wait(lock, [&] { return impl_->in_flight.empty(); })) return;
  throw RuntimeFault(impl_->stall_text(nullptr));
}

std::vector<const char*> Disk::end() const {
  std::unique_lock lock(impl_->mutex);
  impl_->wait(lock, [&] { return impl_->in_flight.empty(); });
  std::vector<const char*> addresses;
  for (const Impl::Request& request : impl_->in_flight) addresses.push_back(request.whole.data);
  return addresses;
}

int64_t Disk::reserved() const { return impl_->reserved; }

int64_t Disk::bytes_read() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->bytes_read;
}

int64_t Disk::bytes_written() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->bytes_written;
}

double Disk::busy_s() const {
  const std::lock_guard lock(impl_->mutex);
  Clock::duration sum = impl_->busy;
  if (!impl_->in_flight.empty()) sum += Clock::now() - impl_->busy_since;
  return std::chrono::duration<double>(sum).count();
}

std::string Disk::describe() const {
  const std::vector<SwapFile>& files = impl_->files;
  const bool direct =
      std::all_of(files.begin(), files.end(), [](const SwapFile& file) { return file.direct(); });
  return concat(files.size(), files.size() == 1 ? " file, " : " files, ", impl_->io->name(),
                direct ? ", O_DIRECT" : ", through the page cache");
}

}  // namespace penstock::mem
