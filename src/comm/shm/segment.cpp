#include "src/comm/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(concat(what, ": ", std::strerror(error)));
}

}  // namespace

ShmSegment ShmSegment::make(const ShmShape& shape, uint64_t key) {
  ShmSegment made;
  made.shape_ = shape;
  made.file_ = memfd_create("penstock-ranks", MFD_CLOEXEC);
  if (made.file_ < 0) fail("memfd_create", errno);
  // Allocates the pages. If the file had holes and memory ran out, SIGBUS would kill a rank.
  const int error = posix_fallocate(made.file_, 0, shape.bytes());
  if (error != 0)
    fail(concat("cannot allocate ", format_bytes(shape.bytes()), " of shared memory"), error);
  made.map(shape.bytes());
  // The header is written last, after the words that others will use.
  auto* header = new (made.memory_) ShmHeader;
  for (int rank = 0; rank < shape.size; ++rank) new (&made.bell(rank)) ShmBell;
  for (int64_t i = 0; i < shape.links(); ++i) new (&made.link(0, static_cast<int>(i))) ShmLink;
  *header = {kShmMagic, key, shape.size, shape.num_slots(), shape.chunk_bytes()};
  return made;
}

ShmSegment ShmSegment::open(const ShmShape& shape, const ShmAddress& address) {
  const std::string path = concat("/proc/", address.pid, "/fd/", address.file);
  ShmSegment opened;
  opened.shape_ = shape;
  opened.file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened.file_ < 0) fail(path, errno);
  struct stat about{};
  if (fstat(opened.file_, &about) != 0) fail(path, errno);
  ShmHeader header;
  const ssize_t got = pread(opened.file_, &header, sizeof(header), 0);
  const bool same = got == sizeof(header) && about.st_size == shape.bytes() &&
                    header.magic == kShmMagic && header.key == address.key &&
                    header.size == shape.size && header.chunk_bytes == shape.chunk_bytes();
  if (!same) throw std::runtime_error(concat(path, " is not the file with the ranks' memory"));
  // The mapping keeps the memory, so the descriptor is no longer needed.
  opened.map(shape.bytes());
  opened.seal();
  return opened;
}

void ShmSegment::map(int64_t bytes) {
  void* memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) fail(concat("mmap of ", format_bytes(bytes)), errno);
  memory_ = static_cast<char*>(memory);
  // If a rank is killed, its forked processes (the workers of a data loader) may outlive it.
  if (madvise(memory, static_cast<size_t>(bytes), MADV_DONTFORK) != 0) fail("madvise", errno);
}

ShmSegment::ShmSegment(ShmSegment&& other) noexcept
    : shape_(other.shape_),
      file_(std::exchange(other.file_, -1)),
      memory_(std::exchange(other.memory_, nullptr)) {}

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  if (this == &other) return *this;
  let_go();
  shape_ = other.shape_;
  file_ = std::exchange(other.file_, -1);
  memory_ = std::exchange(other.memory_, nullptr);
  return *this;
}

ShmSegment::~ShmSegment() { let_go(); }

void ShmSegment::let_go() {
  seal();
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(shape_.bytes()));
  memory_ = nullptr;
}

ShmAddress ShmSegment::address() const {
  return {getpid(), file_, reinterpret_cast<const ShmHeader*>(memory_)->key};
}

void ShmSegment::seal() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

ShmBell& ShmSegment::bell(int rank) const {
  return reinterpret_cast<ShmBell*>(memory_ + shape_.bells_at())[rank];
}

ShmLink& ShmSegment::link(int from, int to) const {
  return reinterpret_cast<ShmLink*>(memory_ + shape_.links_at())[int64_t{from} * shape_.size + to];
}

char* ShmSegment::chunk(int from, int to, int slot, uint32_t number) const {
  const int64_t link = int64_t{from} * shape_.size + to;
  const int64_t index = (link * shape_.num_slots() + slot) * kChunks + number % kChunks;
  return memory_ + shape_.chunks_at() + index * shape_.chunk_bytes();
}

}  // namespace penstock::comm
