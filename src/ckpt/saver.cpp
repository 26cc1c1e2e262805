#include "src/ckpt/saver.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace penstock::ckpt {

namespace {

constexpr int kNice = 10;
constexpr std::chrono::seconds kPatience{5};

}  // namespace

void Saver::start(std::unique_ptr<Save> save, MergeStep merge) {
  finish();
  save_ = std::move(save);
  merge_ = std::move(merge);
  ended_ = false;
  end_ = std::chrono::steady_clock::now() + merge_.timeout;
  thread_ = std::thread([this, behind = merge_.behind] {
    // If all cores compute, training has priority over the save.
    if (behind) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
    run(*save_, merge_);
    ended_ = true;
  });
}

void Saver::run(Save& save, MergeStep& merge) {
  if (merge.starting) merge.starting();
  error_ = save.write();
  if (merge.draft == nullptr) return;
  try {
    if (error_.empty()) {
      path_ = commit(*merge.draft, merge.world, merge.keep,
                     [this] { return std::chrono::steady_clock::now() > end_.load(); });
    }
  } catch (const std::exception& failure) {
    error_ = failure.what();
  }
  merge.draft.reset();  // removes the draft's folder, unless it was committed
}

std::string Saver::finish_alone() {
  end_ = std::min(end_.load(), std::chrono::steady_clock::now() + kPatience);
  return finish();
}

std::string Saver::finish() {
  if (!thread_.joinable()) return "";
  thread_.join();
  save_.reset();
  return std::exchange(error_, "");
}

}  // namespace penstock::ckpt
