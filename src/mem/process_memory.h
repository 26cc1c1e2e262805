#pragma once
// Reads from the system what the memory of this process consists of, for the ledger.
#include <cstdint>

namespace penstock::mem {

// Bytes now; 0 where the system does not report them.
struct ProcessMemory {
  int64_t process = 0;    // resident pages
  int64_t libraries = 0;  // pages of files: the code of Python, torch and the engine
  int64_t shared = 0;     // memory that ranks of this host share
  int64_t heap = 0;       // in use in the heap of malloc
  int64_t heap_free = 0;  // resident in that heap but freed: malloc keeps it for later
};

ProcessMemory process_memory();

}  // namespace penstock::mem
