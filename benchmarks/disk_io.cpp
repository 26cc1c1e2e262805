// The C functions that disk.py measures: the disk tier as the engine uses it, with random values.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "penstock/export.h"
#include "src/mem/arena.h"
#include "src/mem/disk_tier.h"

namespace penstock::bench {

namespace {

constexpr int kWindows = 4;  // windows in flight, each with half of the depth

struct Bench {
  int64_t bytes = 0, request_bytes = 0;
  int depth = 0;
  std::string text;
  mem::Pool pool;
  mem::Arena arena{pool};
  std::deque<mem::Lease> windows;
  std::optional<mem::Disk> disk;  // last member, so that the disk ends before the memory
};

}  // namespace

// Opens a disk with one extent of `bytes`, a multiple of 2 x depth x request_bytes. Throws the
// errors of mem::Disk.
extern "C" PENSTOCK_API Bench* penstock_bench_disk_open(const char* folder, int64_t bytes,
                                                        int64_t request_bytes, int depth) {
  auto bench = std::make_unique<Bench>();
  bench->bytes = bytes;
  bench->request_bytes = request_bytes;
  bench->depth = depth;
  mem::DiskOptions options;
  options.paths = {folder};
  options.stripe_bytes = request_bytes;
  options.make_io = [depth] { return mem::BlockIo::best(depth); };
  bench->disk.emplace(options);
  bench->disk->reserve(bytes);
  bench->disk->allocate();
  bench->text = bench->disk->describe();
  std::mt19937_64 random(0);
  const int64_t window = depth / 2 * request_bytes;
  for (int i = 0; i < kWindows; ++i) {
    bench->windows.push_back(bench->arena.take(window, mem::Account::kOptim));
    auto* values = reinterpret_cast<uint64_t*>(bench->windows.back().data().host());
    for (int64_t j = 0; j < window / 8; ++j) values[j] = random();
  }
  return bench.release();
}

extern "C" PENSTOCK_API const char* penstock_bench_disk_text(const Bench* bench) {
  return bench->text.c_str();
}

// Moves the whole extent in order and keeps the ring full until the end. `mode`: 'r': reads; 'w':
// writes; 'm': both in turn. Returns seconds.
extern "C" PENSTOCK_API double penstock_bench_disk_run(Bench* bench, char mode) {
  mem::Disk& disk = *bench->disk;
  const int64_t window = bench->depth / 2 * bench->request_bytes;
  const int64_t num_windows = bench->bytes / window;
  std::deque<mem::DiskTicket> moving;
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < num_windows; ++i) {
    if (moving.size() == kWindows) {
      disk.wait(moving.front());
      moving.pop_front();
    }
    char* data = bench->windows[i % kWindows].data().host();
    const bool write = mode == 'w' || (mode == 'm' && i % 2 == 1);
    const int64_t offset = (mode == 'm' ? i / 2 : i) * window;
    moving.push_back(write ? disk.write(offset, data, window) : disk.read(offset, data, window));
  }
  disk.wait_for_all();
  for (const mem::DiskTicket& ticket : moving) disk.wait(ticket);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

extern "C" PENSTOCK_API void penstock_bench_disk_close(Bench* bench) { delete bench; }

}  // namespace penstock::bench
