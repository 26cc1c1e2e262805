#include "src/mem/swap_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::mem {

SwapFile::SwapFile(std::string folder, int descriptor)
    : folder_(std::move(folder)), descriptor_(descriptor) {
  if (!is_open()) return;
  const int flags = fcntl(descriptor_, F_GETFL);
  // Not every file system supports O_DIRECT.
  direct_ = fcntl(descriptor_, F_SETFL, flags | O_DIRECT) == 0;
}

SwapFile::SwapFile(SwapFile&& other) noexcept
    : folder_(std::move(other.folder_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      direct_(other.direct_) {}

SwapFile::~SwapFile() {
  if (is_open()) close(descriptor_);
}

SwapFile SwapFile::nameless(const std::string& folder) {
  constexpr int kOwnerOnly = 0600;
  // O_EXCL: nothing can give the file a name later.
  return {folder, ::open(folder.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, kOwnerOnly)};
}

SwapFile SwapFile::named(const std::string& folder) {
  std::string name = folder + "/penstock-swap-XXXXXX";
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  if (descriptor >= 0) unlink(name.c_str());
  return {folder, descriptor};
}

SwapFile SwapFile::open(const std::string& folder) {
  SwapFile file = nameless(folder);
  if (file.is_open()) return file;
  SwapFile other = named(folder);
  if (other.is_open()) return other;
  throw ConfigError(concat("[mem::SwapFile::open] cannot make a swap file in \"", folder,
                           "\" (offload.path): ", std::strerror(errno)));
}

void SwapFile::claim(int64_t from, int64_t to) const {
  const int64_t bytes = to - from;
  int error = 0;
  do {
    error = bytes <= 0 || fallocate(descriptor_, 0, from, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  // The free bytes are needed for the error text, and for file systems that cannot claim space.
  struct statvfs system{};
  fstatvfs(descriptor_, &system);
  const auto free = static_cast<int64_t>(system.f_bavail * system.f_frsize);
  // If the file system cannot claim space, the first write of each extent does. Except for edits of
  // values in users' files, these writes still happen in initialize().
  if (error == EOPNOTSUPP || error == ENOSYS) error = free < bytes ? ENOSPC : 0;
  if (error == 0) return;
  throw RuntimeFault(concat("[mem::SwapFile::claim] \"", folder_, "\" cannot hold a swap file of ",
                            format_bytes(static_cast<double>(bytes)), " (",
                            format_bytes(static_cast<double>(free)),
                            " free): ", std::strerror(error)));
}

}  // namespace penstock::mem
