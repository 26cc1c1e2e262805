#include "src/ckpt/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/ckpt/json.h"

namespace penstock::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLatest = "latest";
constexpr const char* kLock = "lock";
constexpr const char* kSaving = ".saving-";
constexpr const char* kOld = "old";
constexpr const char* kStep = "step-";
constexpr int64_t kMinute = 60;
constexpr int64_t kMostLatestBytes = 4096;  // longer than the longest tag

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  throw RuntimeFault(
      concat("[ckpt::folder] cannot ", what, " \"", path, "\": ", std::strerror(error)));
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags, mode_t mode = 0666)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

void write_all(int fd, const std::string& path, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(fd, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      throw RuntimeFault("[ckpt::folder] cannot write " +
                         space_error(path, static_cast<int64_t>(text.size()), errno));
    }
    done += static_cast<size_t>(wrote);
  }
}

// Returns the time of the newest change, in ns. It determines the order of checkpoints that
// `latest` does not name.
int64_t age_of(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) return 0;
  return found.st_mtim.tv_sec * 1'000'000'000LL + found.st_mtim.tv_nsec;
}

// Returns whether the draft's writer has ended, so that no process holds the draft's lock. A young
// draft without a lock may belong to a writer that is just starting. A replaced or pruned
// checkpoint also has no lock; its name ends in "old", or it has a manifest.
bool is_abandoned(const std::string& draft) {
  const Descriptor lock(draft + "/" + kLock, O_RDWR);
  if (lock.get() >= 0) return ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0;
  if (errno != ENOENT) return false;
  return draft.ends_with(kOld) || exists(draft + "/" + kManifest) ||
         std::time(nullptr) - age_of(draft) / 1'000'000'000 > kMinute;
}

// Renames the folder first, so that after an interrupted removal its name marks it as garbage.
void discard(const std::string& folder) {
  const std::string away = folder.ends_with(kOld) ? folder : concat(folder, "-", kOld);
  const bool renamed = away == folder || ::rename(folder.c_str(), away.c_str()) == 0;
  remove_all(renamed ? away : folder);
}

// Only a checkpoint may be replaced, not a folder or file of the user.
void check_replaceable(const std::string& target) {
  if (!exists(target) || exists(target + "/" + kManifest)) return;
  throw RuntimeFault(concat("[ckpt::save] \"", target,
                            "\" exists and is not a checkpoint. Save under another tag"));
}

// Removes only checkpoints that are named after steps.
void prune(const std::string& root, int keep) {
  std::vector<std::string> all = tags(root);
  std::erase_if(all, [](const std::string& tag) { return !tag.starts_with(kStep); });
  for (size_t i = keep; keep > 0 && i < all.size(); ++i) {
    // A folder whose name begins with a dot is not a checkpoint, so a removal may stop at any
    // point.
    const std::string away = root + "/." + all[i] + kSaving + kOld;
    remove_all(away);
    if (::rename((root + "/" + all[i]).c_str(), away.c_str()) == 0) remove_all(away);
  }
}

}  // namespace

std::string space_error(const std::string& path, int64_t bytes, int error) {
  struct statvfs system{};
  std::string folder = fs::path(path).parent_path().string();
  ::statvfs(folder.empty() ? "." : folder.c_str(), &system);
  return concat(
      "\"", path, "\" (", format_bytes(static_cast<double>(bytes)), " wanted, ",
      format_bytes(static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize)),
      " free): ", std::strerror(error));
}

std::string read_text(const std::string& path) {
  return read_head(path, std::numeric_limits<int64_t>::max());
}

std::string read_head(const std::string& path, int64_t most) {
  // The path may be a pipe without a writer. Without O_NONBLOCK, opening it would block.
  const Descriptor file(path, O_RDONLY | O_NONBLOCK);
  if (file.get() < 0) fail("read", path, errno);
  struct stat found{};
  if (::fstat(file.get(), &found) != 0) fail("read", path, errno);
  if (!S_ISREG(found.st_mode)) {
    throw RuntimeFault(concat("[ckpt::folder] cannot read \"", path, "\": not a regular file"));
  }
  std::string text;
  char block[1 << 16];
  while (true) {
    const int64_t left = most - static_cast<int64_t>(text.size());
    if (left == 0) return text;
    const int64_t wanted = std::min<int64_t>(left, sizeof(block));
    const ssize_t got = ::read(file.get(), block, static_cast<size_t>(wanted));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path, errno);
    if (got == 0) return text;
    text.append(block, static_cast<size_t>(got));
  }
}

void write_text(const std::string& path, const std::string& text) {
  // A rename is atomic, so a reader sees the old text or the new one.
  const std::string draft = path + ".new";
  {
    const Descriptor file(draft, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.get() < 0) fail("create", draft, errno);
    write_all(file.get(), draft, text);
    if (::fsync(file.get()) != 0) fail("sync", draft, errno);
  }
  if (::rename(draft.c_str(), path.c_str()) != 0) fail("rename", draft, errno);
  sync_folder(fs::path(path).parent_path().string());
}

void sync_folder(const std::string& path) {
  const Descriptor folder(path.empty() ? "." : path, O_RDONLY | O_DIRECTORY);
  if (folder.get() < 0) fail("open", path, errno);
  if (::fsync(folder.get()) != 0 && errno != EINVAL) fail("sync", path, errno);
}

void remove_all(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string read_at(int file, int64_t offset, int64_t bytes, void* to) {
  auto* at = static_cast<char*>(to);
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = ::pread(file, at + done, static_cast<size_t>(bytes - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got == 0 ? "the file ends" : std::strerror(errno);
    done += got;
  }
  return "";
}

bool is_tag(const std::string& tag) {
  return !tag.empty() && tag.front() != '.' && tag != kLatest &&
         tag.find_first_of(std::string("/\n\0", 3)) == std::string::npos;
}

Draft::Draft(const std::string& root, const std::string& tag) : root_(root), tag_(tag) {
  std::error_code error;
  fs::create_directories(root, error);
  if (error) fail("create", root, error.value());
  check_replaceable(root + "/" + tag);
  std::vector<std::string> dead;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error)) {
    const std::string found = entry.path().filename().string();
    if (found.front() == '.' && found.find(kSaving) != std::string::npos &&
        is_abandoned(entry.path().string())) {
      dead.push_back(entry.path().string());
    }
  }
  for (const std::string& one : dead) discard(one);
  std::random_device random;
  // The name is random, because other runs may save to the same folder.
  path_ = concat(root, "/.", tag, kSaving, std::hex, random(), random());
  if (::mkdir(path_.c_str(), 0777) != 0) fail("create", path_, errno);
  Descriptor lock(path_ + "/" + kLock, O_RDWR | O_CREAT);
  if (lock.get() < 0 || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    const int why = errno;
    remove_all(path_);
    fail("lock", path_, why);
  }
  lock_ = lock.release();
}

Draft::~Draft() {
  if (!path_.empty()) discard(path_);
  if (lock_ >= 0) ::close(lock_);
}

std::string Draft::commit(int keep) {
  const std::string target = root_ + "/" + tag_;
  sync_folder(path_);
  check_replaceable(target);
  if (!exists(target)) {
    if (::rename(path_.c_str(), target.c_str()) != 0) fail("rename", path_, errno);
  } else if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    discard(path_);  // the previous checkpoint
  } else {  // the file system cannot exchange names, so for a moment no checkpoint has this tag
    const std::string away = root_ + "/." + tag_ + kSaving + kOld;
    remove_all(away);
    if (::rename(target.c_str(), away.c_str()) != 0) fail("rename", target, errno);
    if (::rename(path_.c_str(), target.c_str()) != 0) fail("rename", path_, errno);
    remove_all(away);
  }
  // The checkpoint exists now, so later errors say that it is complete.
  path_.clear();
  try {
    sync_folder(root_);
    ::unlink((target + "/" + kLock).c_str());
    write_text(root_ + "/" + kLatest, tag_ + "\n");
  } catch (const RuntimeFault& error) {
    throw RuntimeFault(concat("the checkpoint \"", target, "\" is complete, but ", error.what()));
  }
  prune(root_, keep);
  return target;
}

std::vector<std::string> tags(const std::string& root) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root, error)) {
    const std::string name = entry.path().filename().string();
    const std::string manifest = entry.path().string() + "/" + kManifest;
    if (name.front() != '.' && exists(manifest)) found.emplace_back(age_of(manifest), name);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> names;
  for (auto& [age, name] : found) names.push_back(std::move(name));
  const std::string pointer = root + "/" + kLatest;
  if (!exists(pointer)) return names;
  std::string why;
  try {
    const std::string text = read_head(pointer, kMostLatestBytes);
    const auto at = std::find(names.begin(), names.end(), trim(text));
    if (at != names.end()) {
      std::rotate(names.begin(), at, at + 1);
      return names;
    }
    why = concat("it names \"", printable(trim(text)), "\", which is no checkpoint in this folder");
  } catch (const RuntimeFault& fault) {
    why = fault.what();
  }
  std::fprintf(stderr, "penstock: \"%s\" is not usable, so the newest checkpoint is used: %s\n",
               pointer.c_str(), why.c_str());
  return names;
}

}  // namespace penstock::ckpt
