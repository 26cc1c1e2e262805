#include "tests/device/simulated/arena.h"

#include <sys/mman.h>
#include <c10/util/Exception.h>

#include "tests/device/simulated/control.h"

namespace penstock::sim {
namespace {

constexpr size_t kAllBytes = kArenaBytes * kDevices;

struct Ranges {
  char* pointers = map(PROT_NONE);
  char* memory = map(PROT_READ | PROT_WRITE);

  // Pages that are never touched take no memory.
  static char* map(int protection) {
    void* range =
        mmap(nullptr, kAllBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "[sim] cannot reserve ", kAllBytes, " bytes of addresses");
    return static_cast<char*>(range);
  }
};

const Ranges& ranges() {
  static const Ranges ranges;
  return ranges;
}

}  // namespace

char* arena(int device) { return ranges().pointers + kArenaBytes * device; }

int device_of(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  const char* first = ranges().pointers;
  if (address < first || address >= first + kAllBytes) return -1;
  return static_cast<int>(static_cast<size_t>(address - first) / kArenaBytes);
}

void* shadow(const void* pointer) {
  if (!pointer) return nullptr;
  TORCH_CHECK(device_of(pointer) >= 0, "illegal memory access: ", pointer,
              " is not a device pointer (a window without memory, or host memory)");
  return ranges().memory + (static_cast<const char*>(pointer) - ranges().pointers);
}

}  // namespace penstock::sim
