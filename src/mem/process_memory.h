#pragma once
// Reads from the system how much memory of each kind this process uses, for the ledger.
#include <cstdint>

namespace penstock::mem {

// Bytes now; 0 where the system does not report them.
struct ProcessMemory {
  int64_t process = 0;    // resident pages
  int64_t libraries = 0;  // pages of files: the code of Python, torch and the engine
  int64_t shared = 0;     // memory that ranks of this host share
  int64_t heap = 0;       // malloc's heap: in use
  int64_t heap_free = 0;  // malloc's heap: freed but still resident, kept for later use
};

ProcessMemory process_memory();

}  // namespace penstock::mem
