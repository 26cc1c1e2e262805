#pragma once
// Folder: the folder of one run's checkpoints. Each checkpoint is a subfolder. The file `latest`
// names one of the checkpoints. A checkpoint is written under a name that begins with a dot, and
// renamed when it is complete. So every subfolder whose name does not begin with a dot is complete.
// On an error, the functions below throw a RuntimeFault with the path and the system's reason.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock::ckpt {

inline constexpr const char* kManifest = "checkpoint.json";

// ---- files
std::string read_text(const std::string& path);
// Returns the first bytes of the file, at most `most`.
std::string read_head(const std::string& path, int64_t most);
// Writes the file durably: after a crash the file has the whole text or does not exist.
void write_text(const std::string& path, const std::string& text);
void sync_folder(const std::string& path);
// Removes as much as it can and reports no errors.
void remove_all(const std::string& path);
bool exists(const std::string& path);
// Reads `bytes` bytes at `offset` of an open file. Returns "" on success, or the reason why fewer
// bytes were read.
std::string read_at(int file, int64_t offset, int64_t bytes, void* to);
// "PATH: 12.00 GiB wanted, 3.10 GiB free: No space left on device"
std::string space_error(const std::string& path, int64_t bytes, int error);

// Returns whether `tag` is a valid name of a checkpoint.
bool is_tag(const std::string& tag);

// ---- a checkpoint that is being written; on rank 0
class Draft {
 public:
  // Makes `root` and the draft's folder in it. Removes drafts whose writers have ended. Throws
  // RuntimeFault if root/tag exists and is not a checkpoint.
  Draft(const std::string& root, const std::string& tag);
  // Removes the draft's folder, unless it was committed.
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  const std::string& path() const { return path_; }
  // Must be called when every file in the draft is durable. Renames the draft to root/tag; an
  // existing checkpoint of that name is replaced in one step. Then writes `latest`. Unless `keep`
  // is 0, removes all checkpoints named "step-..." except the `keep` newest ones. Returns the path.
  std::string commit(int keep);

 private:
  const std::string root_, tag_;
  std::string path_;
  int lock_ = -1;  // locked while this process lives
};

// ---- complete checkpoints
// Returns the tags of the complete checkpoints: first the one that `latest` names, then the other
// tags from newest to oldest. Returns an empty list if the folder does not exist. If `latest`
// exists but names no complete checkpoint, prints a line on stderr.
std::vector<std::string> tags(const std::string& root);

}  // namespace penstock::ckpt
