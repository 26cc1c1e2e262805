#pragma once
// Folder: the checkpoints of one run, each in a folder below it, and `latest`, a file that names
// one. A checkpoint is written under a name that begins with a dot, and renamed when it is
// complete. So every name without a dot is complete. Errors are RuntimeFaults that name the path
// and the system's reason.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock::ckpt {

inline constexpr const char* kManifest = "checkpoint.json";

// ---- files
std::string read_text(const std::string& path);
// Writes the file durably: after a crash it is there with the whole text, or not at all.
void write_text(const std::string& path, const std::string& text);
void sync_folder(const std::string& path);
// Removes what it can; reports no error.
void remove_all(const std::string& path);
bool exists(const std::string& path);
// "PATH: 12.00 GiB wanted, 3.10 GiB free: No space left on device"
std::string space_error(const std::string& path, int64_t bytes, int error);

// Returns whether `tag` is a valid name of a checkpoint.
bool is_tag(const std::string& tag);

// ---- a checkpoint that is being written; on rank 0
class Draft {
 public:
  // Makes `root` and the draft's folder in it. Removes drafts that dead writers left. Throws
  // RuntimeFault if root/tag exists and is not a checkpoint.
  Draft(const std::string& root, const std::string& tag);
  // Removes the draft's folder, unless it was committed.
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  const std::string& path() const { return path_; }
  // Every file in the draft must be durable. Renames the draft to root/tag; an existing checkpoint
  // of that name is replaced in one step. Then writes `latest`, and removes all but the `keep`
  // newest of the checkpoints named "step-..." (0: keeps all). Returns the path.
  std::string commit(int keep);

 private:
  const std::string root_, tag_;
  std::string path_;
  int lock_ = -1;  // locked while this process lives
};

// ---- complete checkpoints
// Returns the tags of the complete checkpoints: the one that `latest` names, then the others from
// new to old. Returns nothing if the folder does not exist.
std::vector<std::string> tags(const std::string& root);

}  // namespace penstock::ckpt
