#include "src/engine/watch/run_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

nlohmann::json number(double value) {
  if (!std::isfinite(value)) return nullptr;
  const bool whole = value == std::floor(value) && std::abs(value) < 0x1p53;
  return whole ? nlohmann::json(static_cast<int64_t>(value)) : nlohmann::json(value);
}

// Returns whether the file ends within a line. It does if a process was killed during a write.
// Leaves the position at the end.
bool ends_within_a_line(std::fstream& file) {
  file.seekg(0, std::ios::end);
  if (file.tellg() <= 0) return false;
  file.seekg(-1, std::ios::end);
  const int last = file.get();
  file.clear();
  return last != '\n';
}

}  // namespace

RunFiles::RunFiles(const std::string& folder, const std::vector<std::string>& formats)
    : folder_(std::filesystem::absolute(folder)) {
  for (const std::string& format : formats) {
    jsonl_ = jsonl_ || format == "jsonl";
    csv_ = csv_ || format == "csv";
  }
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (problem) {
    throw ConfigError(
        concat("[engine::initialize] \"monitor.path\" is \"", folder, "\": ", problem.message()));
  }
  take();
  thread_ = std::thread([this] { run(); });
}

void RunFiles::take() {
  const std::string where = concat("[engine::initialize] \"monitor.path\" is \"", folder_, "\"");
  if (access(folder_.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(concat(where, ", which cannot be written to: ", std::strerror(errno)));
  }
  lock_ = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0 || flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  const bool taken = errno == EWOULDBLOCK;
  close(std::exchange(lock_, -1));
  if (!taken) return;
  throw ConfigError(
      concat(where, ", to which another open engine writes. Give each engine its own folder"));
}

RunFiles::~RunFiles() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  thread_.join();
  if (dropped_ > 0) {
    say(concat(dropped_, " rows were dropped: the disk is slower than the steps"));
  }
  if (lock_ < 0) return;
  flock(lock_, LOCK_UN);  // close() is not enough, because forked processes share the open file
  close(lock_);
}

void RunFiles::add(const StepMetrics& metrics) {
  const std::lock_guard lock(mutex_);
  if (waiting_.size() >= kMostWaiting) {
    ++dropped_;
    return;
  }
  waiting_.push_back({{}, {}, metrics});
  changed_.notify_all();
}

void RunFiles::replace(const std::string& name, std::string text) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({name, std::move(text), {}});
  changed_.notify_all();
}

void RunFiles::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return waiting_.empty() && !writing_; });
}

void RunFiles::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const FileTask task = std::move(waiting_.front());
    waiting_.pop_front();
    writing_ = true;
    lock.unlock();  // add() must not wait for the disk
    write(task);
    lock.lock();
    writing_ = false;
    changed_.notify_all();
  }
}

void RunFiles::write(const FileTask& task) {
  if (!task.name.empty()) {
    // The text is written to a new file, which is then renamed. So readers never see half of the
    // text.
    const std::string path = concat(folder_, "/", task.name), made = path + ".new";
    std::ofstream file(made);
    file << task.text;
    file.close();
    if (!file || std::rename(made.c_str(), path.c_str()) != 0) say(path + " cannot be written");
    return;
  }
  const auto values = task.row.values();
  if (jsonl_) {
    nlohmann::ordered_json row = nlohmann::ordered_json::object();
    for (const auto& [name, value] : values) row[name] = number(value);
    append("metrics.jsonl", "", row.dump() + "\n");
  }
  if (!csv_) return;
  std::vector<std::string> names, cells;
  for (const auto& [name, value] : values) {
    names.push_back(name);
    cells.push_back(std::isfinite(value) ? number(value).dump() : "");
  }
  append("metrics.csv", join(names, ",") + "\n", join(cells, ",") + "\n");
}

// Opens the file for each row, so that a moved folder or a full disk is noticed.
void RunFiles::append(const std::string& name, const std::string& heading,
                      const std::string& line) {
  const std::string path = concat(folder_, "/", name);
  std::error_code none;
  const bool fresh = !std::filesystem::exists(path, none);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::app);
  if (fresh) file << heading;
  if (!fresh && ends_within_a_line(file)) file << "\n";
  file << line;
  file.close();
  if (!file) say(concat(path, " cannot be written: ", std::strerror(errno)));
}

void RunFiles::say(const std::string& what) {
  if (said_) return;
  said_ = true;
  const std::string line = concat("[penstock] monitor: ", what,
                                  "; training continues, and further errors are not reported\n");
  std::fputs(line.c_str(), stderr);
}

}  // namespace penstock::engine
