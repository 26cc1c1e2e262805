#pragma once
// SwapFile: a file without a name. Its space is the system's again when its owner is gone, whatever
// ended it.
#include <cstdint>
#include <string>

namespace penstock::mem {

class SwapFile {
 public:
  // Nameless where the file system has that, else named() and unlinked. Throws ConfigError with the
  // folder and the system's reason.
  static SwapFile open(const std::string& folder);
  // Made without a name, so that no moment is left in which a kill would leave one. A file system
  // without such files gives one that is not is_open().
  static SwapFile nameless(const std::string& folder);
  // Made under a name that is taken away at once; not is_open() where that fails (errno says why).
  static SwapFile named(const std::string& folder);

  SwapFile(SwapFile&& other) noexcept;
  SwapFile& operator=(SwapFile&&) = delete;
  ~SwapFile();

  // Claims the space from offset `from` to `to`. Throws RuntimeFault with folder, bytes needed and
  // bytes free when the disk is too full.
  void claim(int64_t from, int64_t to) const;

  const std::string& folder() const { return folder_; }
  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }  // past the page cache

 private:
  SwapFile(std::string folder, int descriptor);

  std::string folder_;
  int descriptor_;
  bool direct_ = false;
};

}  // namespace penstock::mem
