#include "src/mem/process_memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>

namespace penstock::mem {

namespace {

// Returns the value of a line "Name:   12 kB" in bytes.
int64_t bytes_of(const std::string& line) {
  return std::stoll(line.substr(line.find(':') + 1)) * 1024;
}

// Returns the resident bytes of the main heap. The system writes mappings in the order of their
// addresses, and the heap is near the beginning, so only a few lines are read.
int64_t heap_resident() {
  std::ifstream mappings("/proc/self/smaps");
  bool in_heap = false;
  for (std::string line; std::getline(mappings, line);) {
    if (line.ends_with("[heap]")) in_heap = true;
    if (in_heap && line.starts_with("Rss:")) return bytes_of(line);
  }
  return 0;
}

}  // namespace

ProcessMemory process_memory() {
  ProcessMemory memory;
  const std::map<std::string, int64_t*> fields = {
      {"VmRSS:", &memory.process}, {"RssFile:", &memory.libraries}, {"RssShmem:", &memory.shared}};
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    const auto field = fields.find(line.substr(0, line.find_first_of(" \t")));
    if (field == fields.end()) continue;
    *field->second = bytes_of(line);
  }
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 heap = mallinfo2();
  memory.heap = static_cast<int64_t>(heap.uordblks + heap.hblkhd);
  // malloc's own count (fordblks) includes pages that were returned to the system.
  const int64_t resident = heap_resident() - static_cast<int64_t>(heap.uordblks);
  memory.heap_free = std::clamp<int64_t>(resident, 0, static_cast<int64_t>(heap.fordblks));
#endif
  return memory;
}

}  // namespace penstock::mem
