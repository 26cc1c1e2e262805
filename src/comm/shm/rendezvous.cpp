#include "src/comm/shm/rendezvous.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "src/base/text.h"

namespace penstock::comm {
// [Note: Meeting] The ranks agree in three rounds of keys in the store, in this order:
//   who      host, process, and the address and value of a word to probe
//   sees     whether this rank can open the other processes, and read their memory
//   has      whether this rank has mapped the memory that rank 0 made ("segment")
// All ranks read all answers of a round, so all ranks reach the same result. If a process ends
// during the meeting, the ranks that notice this give the answer in its place, so no rank waits for
// the timeout.

namespace {

// Answers of a rank. Any other text is the reason why the rank cannot share memory.
constexpr const char* kSpans = "+spans";
constexpr const char* kChunked = "+chunked";
constexpr const char* kReady = "+ready";
// First character of the answer for a rank whose process has ended. The ranks that notice the end
// give this answer.
constexpr char kGone = '!';

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string namespace_of_processes() {
  std::array<char, 64> name{};
  const ssize_t length = readlink("/proc/self/ns/pid", name.data(), name.size());
  return length > 0 ? std::string(name.data(), static_cast<size_t>(length)) : "?";
}

uint64_t random_key() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// If Yama lets only a parent read the memory of a process, this call also allows processes that
// descend from the same parent. It allows no other process. A failure does not matter, because the
// memory access is tested later.
void allow_siblings() {
  if (first_line("/proc/sys/kernel/yama/ptrace_scope") == "1") prctl(PR_SET_PTRACER, getppid());
}

struct Who {
  std::string host;
  int64_t pid = 0;
  uint64_t probe_at = 0, probe = 0;
};

class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout)
      : store_(store), rank_(rank), size_(size), timeout_(timeout), probe_(random_key()) {}

  ShmMeeting hold() {
    const std::string host =
        concat(first_line("/proc/sys/kernel/random/boot_id"), "/", namespace_of_processes());
    allow_siblings();
    say("who", concat(host, " ", getpid(), " ", reinterpret_cast<uint64_t>(&probe_), " ", probe_));
    for (const std::string& text : all("who")) add(text);
    ShmMeeting met;
    for (const Who& other : who_) met.one_host = met.one_host && other.host == who_[0].host;
    if (!met.one_host) {
      met.why_not = "the ranks are on several hosts";
      return met;
    }
    say("sees", see_all());
    const std::vector<std::string> seen = all("sees");
    met.why_not = objection(seen);
    if (!met.why_not.empty()) return met;
    ShmShape shape{size_, true};
    for (const std::string& text : seen) shape.spans = shape.spans && text == kSpans;
    auto fabric = share(shape);
    met.why_not = objection(all("has"));
    if (met.why_not.empty()) met.fabric = std::move(fabric);
    return met;
  }

 private:
  static std::string key(const char* what, int rank) { return concat(what, "/", rank); }

  void say(const char* what, const std::string& text) {
    store_.set(key(what, rank_), std::vector<uint8_t>(text.begin(), text.end()));
  }

  std::string hear(const char* what, int rank) {
    const std::string from = key(what, rank);
    store_.wait({from}, timeout_);
    const std::vector<uint8_t> text = store_.get(from);
    return {text.begin(), text.end()};
  }

  std::vector<std::string> all(const char* what) {
    std::vector<std::string> texts;
    for (int rank = 0; rank < size_; ++rank) {
      texts.push_back(hear(what, rank));
      if (texts.back()[0] == kGone) throw std::runtime_error(texts.back().substr(1));
    }
    return texts;
  }

  // Returns the first rank that gives a reason, and the reason.
  static std::string objection(const std::vector<std::string>& said) {
    for (size_t rank = 0; rank < said.size(); ++rank) {
      if (said[rank].empty() || said[rank][0] != '+')
        return concat("rank ", rank, ": ", said[rank]);
    }
    return "";
  }

  void add(const std::string& text) {
    std::istringstream words(text);
    Who& one = who_.emplace_back();
    words >> one.host >> one.pid >> one.probe_at >> one.probe;
  }

  std::string end_of(int dead) const {
    return concat(kGone, "rank ", dead, " is gone: its process, ",
                  who_[static_cast<size_t>(dead)].pid, ", has ended");
  }

  // Runs on the watch thread. It needs its own connection to the store, because this rank's main
  // thread waits on the first connection.
  void say_for(int dead) {
    try {
      const auto store = store_.clone();
      const std::string text = end_of(dead);
      for (const char* what : {"sees", "segment", "has"}) {
        store->compareSet(key(what, dead), std::string(), text);
      }
    } catch (const std::exception&) {
      // The store's host is gone, which this rank's main thread also notices.
    }
  }

  // Checks the other processes: whether they exist and whether their memory can be read.
  std::string see_all() {
    try {
      std::vector<int64_t> pids;
      for (const Who& one : who_) pids.push_back(one.pid);
      watch_.emplace(pids, [this](int dead) { say_for(dead); });
      // If one rank answers kChunked, all ranks copy through chunks.
      for (const Who& one : who_) {
        if (one.pid != getpid() && !reads(one)) return kChunked;
      }
      return kSpans;
    } catch (const std::exception& error) {
      for (int rank = 0; rank < size_; ++rank) {
        if (ProcessWatch::has_ended(who_[static_cast<size_t>(rank)].pid)) return end_of(rank);
      }
      return reason(error);
    }
  }

  static bool reads(const Who& other) {
    uint64_t value = 0;
    const iovec here{&value, sizeof(value)};
    const iovec there{reinterpret_cast<void*>(other.probe_at), sizeof(value)};
    const ssize_t got = process_vm_readv(static_cast<pid_t>(other.pid), &here, 1, &there, 1, 0);
    return got == sizeof(value) && value == other.probe;
  }

  // Returns null if the memory cannot be shared; the answers inform the other ranks.
  std::unique_ptr<ShmFabric> share(const ShmShape& shape) {
    try {
      auto segment = std::make_shared<ShmSegment>(rank_ == 0 ? make(shape) : open(shape));
      std::vector<int64_t> pids;
      for (const Who& one : who_) pids.push_back(one.pid);
      auto fabric = std::make_unique<ShmFabric>(segment, rank_, std::move(pids));
      say("has", kReady);
      for (int rank = 1; rank < size_ && rank_ == 0; ++rank) hear("has", rank);
      segment->seal();
      return fabric;
    } catch (const std::exception& error) {
      if (rank_ == 0) say("segment", "");
      // Rank 0 keeps the file open until all ranks have mapped it. So if the file cannot be opened,
      // rank 0 may have ended.
      say("has", ProcessWatch::has_ended(who_[0].pid) ? end_of(0) : reason(error));
      return nullptr;
    }
  }

  ShmSegment make(const ShmShape& shape) {
    ShmSegment segment = ShmSegment::make(shape, random_key());
    const ShmAddress at = segment.address();
    say("segment", concat(at.file, " ", at.key));
    return segment;
  }

  ShmSegment open(const ShmShape& shape) {
    const std::string found = hear("segment", 0);
    if (found[0] == kGone) throw std::runtime_error(found.substr(1));
    std::istringstream words(found);
    ShmAddress at;
    at.pid = who_[0].pid;
    if (!(words >> at.file >> at.key))
      throw std::runtime_error("rank 0 could not make the memory to share");
    return ShmSegment::open(shape, at);
  }

  c10d::Store& store_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  uint64_t probe_;  // the word that the other ranks probe
  std::vector<Who> who_;
  std::optional<ProcessWatch> watch_;  // the last member, because its thread uses the other members
};

}  // namespace

ShmMeeting meet_in_memory(c10d::Store& store, int rank, int size,
                          std::chrono::milliseconds timeout) {
  return Meeting(store, rank, size, timeout).hold();
}

}  // namespace penstock::comm
