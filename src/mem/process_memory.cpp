#include "src/mem/process_memory.h"

#include <malloc.h>

#include <fstream>
#include <map>
#include <string>

namespace penstock::mem {

ProcessMemory process_memory() {
  ProcessMemory memory;
  const std::map<std::string, int64_t*> fields = {
      {"VmRSS:", &memory.process}, {"RssFile:", &memory.libraries}, {"RssShmem:", &memory.shared}};
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    const auto field = fields.find(line.substr(0, line.find_first_of(" \t")));
    if (field == fields.end()) continue;
    *field->second = std::stoll(line.substr(field->first.size())) * 1024;  // kB
  }
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 heap = mallinfo2();
  memory.heap = static_cast<int64_t>(heap.uordblks + heap.hblkhd);
  memory.heap_free = static_cast<int64_t>(heap.fordblks);
#endif
  return memory;
}

}  // namespace penstock::mem
