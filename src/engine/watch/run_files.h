#pragma once
// RunFiles: the files of a run. A separate thread writes them, so training never waits: if the
// queue is full, a row is dropped. A failed write is reported once on stderr.
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

// metrics.jsonl has one JSON object per row, with null for an unknown value. metrics.csv has a
// heading row, and an empty cell for an unknown value. Rows are appended, so the files are valid up
// to the last row, no matter when the process ends. Formats that only Python writes are ignored
// here.
class RunFiles {
 public:
  static constexpr size_t kMostWaiting = 4096;  // rows

  // Makes and locks the folder: only one run may write there. Throws ConfigError if that fails.
  RunFiles(const std::string& folder, const std::vector<std::string>& formats);
  ~RunFiles();  // writes the rows that are queued
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  const std::string& folder() const { return folder_; }
  void add(const StepMetrics& metrics);
  // Writes `text` to the file `name`. Replaces an existing file of that name.
  void replace(const std::string& name, std::string text);
  void flush();  // blocks until everything is written or was reported as failed

 private:
  struct FileTask {
    std::string name;  // name of the file to replace; "": append a row
    std::string text;
    StepMetrics row;
  };
  void run();
  void write(const FileTask& task);
  void append(const std::string& name, const std::string& heading, const std::string& line);
  void say(const std::string& what);

  void take();  // locks the folder

  const std::string folder_;
  int lock_ = -1;  // descriptor of the locked folder; -1: the file system has no locks
  bool jsonl_ = false, csv_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FileTask> waiting_;  // guarded by mutex_
  bool closing_ = false;          // guarded by mutex_
  bool writing_ = false;          // guarded by mutex_
  int64_t dropped_ = 0;           // guarded by mutex_
  bool said_ = false;             // used only by the thread
  std::thread thread_;
};

}  // namespace penstock::engine
