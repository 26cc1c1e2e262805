#include "src/base/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr uint64_t kMagic = 0x32306b636f74736eULL;  // marks this layout of the page
constexpr int kWords = kBoardText / 8;
// Attempts to read a cell. They are limited because a cell's writer may stop during a write.
constexpr int kTries = 10000;
constexpr size_t kLastLines = 5;  // plan lines in an error's text

template <class T>
using Shared = std::atomic<T>;
static_assert(Shared<uint64_t>::is_always_lock_free && Shared<int32_t>::is_always_lock_free);

int64_t now_ns() {
  // steady_clock is the same for all processes of a machine.
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

// Seqlock with one writer at a time: `version` is odd while the cell is being written.
struct Board::Cell {
  Shared<uint32_t> version = 0;
  Shared<uint32_t> length = 0;
  Shared<int64_t> begin_ns = 0, step = 0;
  std::array<Shared<uint64_t>, kWords> words{};

  RankStatus::Line read(int64_t now) const {
    RankStatus::Line line;
    for (int i = 0; i < kTries; ++i) {
      const uint32_t before = version.load(std::memory_order_acquire);
      std::array<uint64_t, kWords> text{};
      for (int word = 0; word < kWords; ++word) text[word] = words[word].load(relaxed);
      const uint32_t size = length.load(relaxed);
      line.step = step.load(relaxed);
      line.age_s = static_cast<double>(now - begin_ns.load(relaxed)) * 1e-9;
      line.text.assign(reinterpret_cast<const char*>(text.data()),
                       std::min<size_t>(size, kBoardText));
      if (size > kBoardText) line.text += "...";
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && version.load(relaxed) == before) return line;
      std::this_thread::yield();
    }
    return {.text = "?"};
  }

  static constexpr std::memory_order relaxed = std::memory_order_relaxed;
};

// A lane's name and current collective. The name is at most 16 bytes, stored as two words.
struct Board::LaneCell {
  std::array<Shared<uint64_t>, 2> name{};
  Shared<int64_t> sequence = 0;
  Shared<int32_t> peer = -1;
  Shared<uint32_t> tag = 0;
  Shared<bool> used = false, waits = false;
  Cell cell;
};

// Layout of the file; readers map it read-only. The roster follows the page.
struct Board::Page {
  uint64_t magic = kMagic;
  int32_t rank = 0, size = 1;
  int64_t pid = 0;
  Shared<uint64_t> run = 0;
  Shared<uint32_t> roster_bytes = 0;  // the roster follows the page
  Shared<uint32_t> num_lines = 0;  // lines logged so far; the page has the last kBoardLines lines
  Cell at;
  Shared<int64_t> applied_ns = 0;  // time of the last applied step; 0: none
  std::array<Shared<double>, kStepNumbers.size()> numbers{};
  std::array<LaneCell, kBoardLanes> lanes;
  std::array<Cell, kBoardLines> lines;
};

// Without a memfd the page is private memory: the rank runs, but `penstock status` cannot see it.
Board::Board(int rank, int size, std::string report_dir) : report_dir_(std::move(report_dir)) {
  file_ = memfd_create(kStatusFile, MFD_CLOEXEC);
  if (file_ >= 0 && ftruncate(file_, sizeof(Page)) != 0) close(std::exchange(file_, -1));
  const int flags = file_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, flags, file_, 0);
  if (memory == MAP_FAILED) {
    if (file_ >= 0) close(file_);
    throw RuntimeFault(concat("[base::Board] rank ", rank, " cannot map the ", sizeof(Page),
                              " bytes of its board: ", std::strerror(errno)));
  }
  page_ = new (memory) Page;
  page_->rank = rank;
  page_->size = size;
  page_->pid = getpid();
  at("initialize");
}

Board::~Board() {
  munmap(page_, sizeof(Page));
  if (file_ >= 0) close(file_);
}

int Board::lane(std::string_view name) {
  std::array<uint64_t, 2> words{};
  std::memcpy(words.data(), name.data(), std::min(name.size(), sizeof(words)));
  for (int i = 0; i < kBoardLanes; ++i) {
    LaneCell& lane = page_->lanes[i];
    if (lane.used && (lane.name[0] != words[0] || lane.name[1] != words[1])) continue;
    for (size_t word = 0; word < words.size(); ++word) lane.name[word] = words[word];
    lane.used = true;
    return i;
  }
  return -1;
}

void Board::meet(uint64_t run, const std::string& roster) {
  if (file_ < 0) return;
  const auto written = pwrite(file_, roster.data(), roster.size(), sizeof(Page));
  if (written != static_cast<ssize_t>(roster.size())) return;  // readers then show "not met yet"
  page_->roster_bytes.store(static_cast<uint32_t>(roster.size()), std::memory_order_release);
  page_->run.store(run, std::memory_order_release);
}

void Board::write(Cell& cell, int64_t step, std::string_view text) {
  constexpr std::memory_order relaxed = std::memory_order_relaxed;
  const size_t size = std::min<size_t>(text.size(), kBoardText);
  std::array<uint64_t, kWords> words{};
  std::memcpy(words.data(), text.data(), size);
  const uint32_t version = cell.version.load(relaxed);
  cell.version.store(version + 1, relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  cell.begin_ns.store(now_ns(), relaxed);
  cell.step.store(step, relaxed);
  cell.length.store(static_cast<uint32_t>(text.size()), relaxed);
  for (size_t word = 0; word < (size + 7) / 8; ++word) cell.words[word].store(words[word], relaxed);
  cell.version.store(version + 2, std::memory_order_release);
}

void Board::at(std::string_view what) { write(page_->at, step_, what); }

void Board::applied(const StepNumbers& numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    page_->numbers[i].store(numbers[i], std::memory_order_relaxed);
  }
  page_->applied_ns.store(now_ns(), std::memory_order_release);
}

// The lines form a ring: line i is in cell i % kBoardLines.
void Board::log(std::string_view line, bool computes) {
  const uint32_t count = page_->num_lines.load(std::memory_order_relaxed);
  write(page_->lines[count % kBoardLines], step_, line);
  page_->num_lines.store(count + 1, std::memory_order_release);
  if (computes) at(line);
}

void Board::wait_begins(int lane, const Collective& collective, std::string_view text) {
  if (lane < 0) return;
  LaneCell& to = page_->lanes[lane];
  to.sequence.store(collective.sequence, std::memory_order_relaxed);
  to.tag.store(collective.tag, std::memory_order_relaxed);
  to.peer.store(-1, std::memory_order_relaxed);
  write(to.cell, collective.step, text);
  to.waits.store(true, std::memory_order_release);
}

void Board::waits_for(uint32_t tag, int peer) {
  for (LaneCell& lane : page_->lanes) {
    if (lane.waits.load(std::memory_order_relaxed) &&
        lane.tag.load(std::memory_order_relaxed) == tag) {
      lane.peer.store(peer, std::memory_order_relaxed);
    }
  }
}

void Board::wait_ends(int lane) {
  if (lane >= 0) page_->lanes[lane].waits.store(false, std::memory_order_release);
}

RankStatus Board::read(const Page& page) {
  RankStatus status;
  const int64_t now = now_ns();
  status.rank = page.rank;
  status.size = page.size;
  status.pid = page.pid;
  status.run = page.run;
  status.at = page.at.read(now);
  const int64_t applied = page.applied_ns.load(std::memory_order_acquire);
  if (applied > 0) status.step_age_s = static_cast<double>(now - applied) * 1e-9;
  for (size_t i = 0; i < status.numbers.size(); ++i) {
    status.numbers[i] = page.numbers[i].load(std::memory_order_relaxed);
  }
  for (const LaneCell& cell : page.lanes) {
    if (!cell.used) continue;
    RankStatus::Lane& lane = status.lanes.emplace_back();
    std::array<char, 17> name{};
    for (size_t word = 0; word < cell.name.size(); ++word) {
      const uint64_t letters = cell.name[word];
      std::memcpy(name.data() + 8 * word, &letters, sizeof(letters));
    }
    lane.name = name.data();
    lane.waits = cell.waits.load(std::memory_order_acquire);
    lane.peer = cell.peer;
    lane.sequence = cell.sequence;
    lane.tag = cell.tag;
    lane.line = cell.cell.read(now);
  }
  const uint32_t end = page.num_lines.load(std::memory_order_acquire);
  for (uint32_t i = end - std::min<uint32_t>(end, kBoardLines); i < end; ++i) {
    status.log.push_back(page.lines[i % kBoardLines].read(now));
  }
  return status;
}

RankStatus Board::status() const { return read(*page_); }

std::string Board::report(const std::string& error) const {
  const RankStatus now = status();
  if (now.log.empty()) return "";
  std::vector<std::string> last;
  for (size_t i = now.log.size() - std::min(now.log.size(), kLastLines); i < now.log.size(); ++i) {
    last.push_back(concat("`", now.log[i].text, "`"));
  }
  std::string text = concat("; the plan's last lines on rank ", now.rank, ": ", join(last, ", "));
  if (!report_dir_.empty()) text += write_report(now, error);
  return text;
}

std::string Board::write_report(const RankStatus& status, const std::string& error) const {
  const std::string path =
      concat(report_dir_, "/penstock-rank", status.rank, "-pid", status.pid, ".txt");
  std::ofstream file(path, std::ios::app);  // appends, since several lanes may report an error
  file << error << "\n";
  for (const RankStatus::Line& line : status.log) {
    file << concat("step ", line.step, ", ", line.age_s, " s before: ", line.text, "\n");
  }
  file.close();
  return concat("; ", file ? "the report is in " : "no report could be written to ", path);
}

std::optional<RankStatus> RankStatus::read(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat about{};
  if (file < 0 || fstat(file, &about) != 0) {
    const std::string why = std::strerror(errno);
    if (file >= 0) close(file);
    throw RuntimeFault(concat("[base::RankStatus::read] ", path, " cannot be read: ", why));
  }
  std::optional<RankStatus> status;
  void* memory = MAP_FAILED;
  if (about.st_size >= static_cast<off_t>(sizeof(Board::Page)))
    memory = mmap(nullptr, sizeof(Board::Page), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) {
    const auto& page = *static_cast<const Board::Page*>(memory);
    if (page.magic == kMagic) {
      status = Board::read(page);
      std::string roster(page.roster_bytes.load(std::memory_order_acquire), '\0');
      const auto got = pread(file, roster.data(), roster.size(), sizeof(Board::Page));
      if (got > 0 && got == static_cast<ssize_t>(roster.size()))
        status->roster = split(roster, '\n');
    }
    munmap(memory, sizeof(Board::Page));
  }
  close(file);
  return status;
}

}  // namespace penstock
