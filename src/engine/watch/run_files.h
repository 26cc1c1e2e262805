#pragma once
// RunFiles: the files of a run, written by a thread of their own. Training never waits for them: a
// row that finds no room in the queue is dropped, and a file that cannot be written is said once.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/metrics.h"

namespace penstock::engine {

// metrics.jsonl: an object a row, null for what is not known. metrics.csv: a heading and a row
// each, empty for what is not known. Both are appended to, and whole up to the last row whenever
// the process ends. Formats that are Python's are left to it.
class RunFiles {
 public:
  static constexpr size_t kMostWaiting = 4096;  // rows

  // Makes the folder, which one run has at a time. Throws ConfigError where that cannot be.
  RunFiles(const std::string& folder, const std::vector<std::string>& formats);
  ~RunFiles();  // writes what waits
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  const std::string& folder() const { return folder_; }
  void add(const StepMetrics& metrics);
  // A file of that name with this text, in place of the one there is.
  void replace(const std::string& name, std::string text);
  void flush();  // everything is written, or was said to fail

 private:
  struct FileTask {
    std::string name;  // empty: a row
    std::string text;
    StepMetrics row;
  };
  void run();
  void write(const FileTask& task);
  void append(const std::string& name, const std::string& heading, const std::string& line);
  void say(const std::string& what);

  void take();  // the folder

  const std::string folder_;
  int lock_ = -1;  // the folder, while this run has it; -1: its file system knows no locks
  bool jsonl_ = false, csv_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FileTask> waiting_;  // guarded by mutex_
  bool closing_ = false;          // guarded by mutex_
  bool writing_ = false;          // guarded by mutex_
  int64_t dropped_ = 0;           // guarded by mutex_
  bool said_ = false;             // the thread's
  std::thread thread_;
};

}  // namespace penstock::engine
