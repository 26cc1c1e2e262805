#pragma once
// Board: where one rank is and what it waits for, written as it goes.
//
// [Note: Board] A board is an anonymous file (memfd) in memory, which `penstock status` maps
// through /proc/PID/fd. So a rank can be asked while each of its threads is stuck, with the GIL
// held or not, without a signal, a thread or a lock of its own; and nothing is left of it after a
// kill. Every cell is a seqlock of plain stores: no system call, no allocation. Texts are copied,
// since pointers mean nothing to the reader; of those above kBoardText bytes the beginning.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "penstock/status.h"

namespace penstock {

inline constexpr int kBoardLanes = 16;
inline constexpr int kBoardLines = 200;  // of the plan, the last ones
inline constexpr int kBoardText = 120;

// Owned by a group. Each lane's wait_*() from one thread at a time; at() and log() from the thread
// that runs the model; status() from any.
class Board {
 public:
  // `report_dir`: where faults leave a report ("" = nowhere).
  Board(int rank, int size, std::string report_dir = "");
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // Index of the lane of that name; -1 when there are too many, which then do not show.
  int lane(std::string_view name);
  // All ranks have met: `roster` has a line "host pid" for each, `run` is theirs alone.
  void meet(uint64_t run, const std::string& roster);

  void set_step(int64_t step) { step_ = step; }
  void applied(const StepNumbers& numbers);
  void at(std::string_view what);
  // A line of the plan; `computes`: it is also where the model is.
  void log(std::string_view line, bool computes);

  // A collective, which holds on until wait_ends(). Between them waits_for() says for whom.
  struct Collective {
    int64_t step = 0, sequence = 0;
    uint32_t tag = 0;
  };
  void wait_begins(int lane, const Collective& collective, std::string_view text);
  void waits_for(uint32_t tag, int peer);
  void wait_ends(int lane);

  RankStatus status() const;
  // For an error of a lost peer: the last lines of the plan, and where the report with all of them
  // is. "" before the first line.
  std::string report(const std::string& error) const;

 private:
  struct Cell;
  struct LaneCell;
  struct Page;
  friend struct RankStatus;
  static void write(Cell& cell, int64_t step, std::string_view text);
  static RankStatus read(const Page& page);
  std::string write_report(const RankStatus& status, const std::string& error) const;

  int file_ = -1;  // -1: the system gave none, so nobody can ask
  Page* page_ = nullptr;
  int64_t step_ = 0;  // of the model's thread
  const std::string report_dir_;
};

// Where the model's thread is; the board may be null.
inline void show(Board* board, std::string_view what) {
  if (board != nullptr) board->at(what);
}

// In scope: the lane waits. The board may be null.
class Waiting {
 public:
  Waiting(Board* board, int lane, const Board::Collective& collective, std::string_view text)
      : board_(board), lane_(lane) {
    if (board_ != nullptr) board_->wait_begins(lane_, collective, text);
  }
  ~Waiting() {
    if (board_ != nullptr) board_->wait_ends(lane_);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Board* board_;
  int lane_;
};

}  // namespace penstock
