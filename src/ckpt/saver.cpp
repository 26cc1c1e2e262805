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

void Saver::start(std::unique_ptr<Save> save, Together together) {
  finish();
  save_ = std::move(save);
  together_ = std::move(together);
  ended_ = false;
  end_ = std::chrono::steady_clock::now() + together_.timeout;
  thread_ = std::thread([this, behind = together_.behind] {
    // Where all cores compute, training goes first.
    if (behind) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
    run(*save_, together_);
    ended_ = true;
  });
}

void Saver::run(Save& save, Together& together) {
  if (together.starting) together.starting();
  error_ = save.write();
  if (together.draft == nullptr) return;
  try {
    if (error_.empty()) {
      path_ = commit(*together.draft, together.world, together.keep,
                     [this] { return std::chrono::steady_clock::now() > end_.load(); });
    }
  } catch (const std::exception& failure) {
    error_ = failure.what();
  }
  together.draft.reset();  // what is left of it goes
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
