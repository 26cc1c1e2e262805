#pragma once
// Folder: checkpoints of one run, one below the other, and `latest`, which names one. A checkpoint
// is made under a name that begins with a dot and is renamed when it is complete, so what has no
// dot is complete. Errors are RuntimeFaults that name the path and the system's reason.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock::ckpt {

inline constexpr const char* kManifest = "checkpoint.json";

// ---- files
std::string read_text(const std::string& path);
// Durable, and whole or not there, when this returns.
void write_text(const std::string& path, const std::string& text);
void sync_folder(const std::string& path);
// As much as can be; no error.
void remove_all(const std::string& path);
bool exists(const std::string& path);
// "PATH: 12.00 GiB wanted, 3.10 GiB free: No space left on device"
std::string space_error(const std::string& path, int64_t bytes, int error);

// Whether a checkpoint can have that name.
bool is_tag(const std::string& tag);

// ---- a checkpoint that is being made; on rank 0
class Draft {
 public:
  // Makes `root` and the draft's folder in it, and takes away what dead writers left of theirs.
  // Throws RuntimeFault where something of that tag's name is there and is no checkpoint.
  Draft(const std::string& root, const std::string& tag);
  // Takes the folder away, unless it was committed.
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  const std::string& path() const { return path_; }
  // Every file in it is durable. It becomes root/tag, in one step also where there is one, and
  // `latest` names it; then of those named "step-..." only the last `keep` are kept (0: all).
  std::string commit(int keep);

 private:
  const std::string root_, tag_;
  std::string path_;
  int lock_ = -1;  // held while this process lives
};

// ---- complete ones
// Tags of what is complete in it, the one that `latest` names first, then by age, the newest first.
// Empty also where there is no such folder.
std::vector<std::string> tags(const std::string& root);

}  // namespace penstock::ckpt
