#pragma once
// SwapFile: a file without a name. The system reclaims its space when the owning process ends, even
// after a crash.
#include <cstdint>
#include <string>

namespace penstock::mem {

class SwapFile {
 public:
  // Returns a nameless() file if the file system supports such files, else a named() file. Throws
  // ConfigError with the folder and the system's reason.
  static SwapFile open(const std::string& folder);
  // Makes the file without a name, so that no file is left behind even if the process is killed. If
  // the file system has no such files, is_open() of the result is false.
  static SwapFile nameless(const std::string& folder);
  // Makes the file under a name and unlinks it at once. If that fails, is_open() of the result is
  // false, and errno has the reason.
  static SwapFile named(const std::string& folder);

  SwapFile(SwapFile&& other) noexcept;
  SwapFile& operator=(SwapFile&&) = delete;
  ~SwapFile();

  // Claims the space from offset `from` to `to`. Throws RuntimeFault with folder, bytes needed and
  // bytes free if the disk is too full.
  void claim(int64_t from, int64_t to) const;

  const std::string& folder() const { return folder_; }
  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }  // bypasses the page cache

 private:
  SwapFile(std::string folder, int descriptor);

  std::string folder_;
  int descriptor_;
  bool direct_ = false;
};

}  // namespace penstock::mem
