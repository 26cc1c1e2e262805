#pragma once
// Board: where one rank is and what it waits for, updated as the rank runs.
//
// [Note: Board] A board is an anonymous file (memfd) in memory. `penstock status` maps it through
// /proc/PID/fd. A rank can therefore be inspected while all its threads are stuck, with or without
// the GIL, and without a signal, a thread or a lock. A killed process leaves nothing behind. Every
// entry of the board is protected by a seqlock. Writing an entry takes only plain stores, and no
// system calls or allocations. Texts are copied, since a pointer is useless in another process. A
// text longer than kBoardText bytes is cut off.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "src/base/status.h"
#include "src/base/turns.h"

namespace penstock {

inline constexpr int kBoardLanes = 16;
inline constexpr int kBoardLines = 200;  // the last lines of the plan
inline constexpr int kBoardText = 120;

// Owned by a group. Only one thread at a time may call wait_*() for a lane. Only the model's thread
// may call at() and log(). Any thread may call status().
class Board {
 public:
  // `report_dir`: folder for reports of faults ("" = none).
  Board(int rank, int size, std::string report_dir = "");
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // Returns the index of the lane with this name, or -1 if the board already has kBoardLanes lanes.
  // A lane without an index is not shown.
  int lane(std::string_view name);
  // Records that all ranks have met. `roster` has a line "host pid" for each rank; `run` is unique
  // to the run.
  void meet(uint64_t run, const std::string& roster);

  void set_step(int64_t step) { step_ = step; }
  void applied(const StepNumbers& numbers);
  void at(std::string_view what);
  // Records a plan line. `computes`: the line becomes the model's position.
  void log(std::string_view line, bool computes);

  // A collective. It lasts until wait_ends(); until then, waits_for() records the peer that the
  // lane waits for.
  struct Collective {
    int64_t step = 0, sequence = 0;
    uint32_t tag = 0;
  };
  void wait_begins(int lane, const Collective& collective, std::string_view text);
  void waits_for(uint32_t tag, int peer);
  void wait_ends(int lane);

  // The calls of the model's thread that run collectives. They are not in the file, so other
  // processes cannot read them.
  TurnLog& turns() { return turns_; }

  RankStatus status() const;
  // Returns text for the error about a lost peer: the last plan lines, and the path of a report
  // with all lines of the board. Returns "" before the first line.
  std::string report(const std::string& error) const;

 private:
  struct Cell;
  struct LaneCell;
  struct Page;
  friend struct RankStatus;
  static void write(Cell& cell, int64_t step, std::string_view text);
  static RankStatus read(const Page& page);
  std::string write_report(const RankStatus& status, const std::string& error) const;

  int file_ = -1;  // -1: the system gave no file, so other processes cannot read the board
  Page* page_ = nullptr;
  int64_t step_ = 0;  // written by the model's thread
  const std::string report_dir_;
  TurnLog turns_;
};

// Records the position of the model's thread; the board may be null.
inline void show(Board* board, std::string_view what) {
  if (board != nullptr) board->at(what);
}

// Records that the model's thread begins a call that runs collectives. All ranks must begin calls
// of the same `kind`. `did` describes the call in error texts. The board may be null.
inline void take_turn(Board* board, const std::string& kind, const std::string& did) {
  if (board != nullptr) board->turns().begin({kind, did, std::string(), false});
}

// Records that the call ended early on this rank. `error` is a text such as "left its forward
// because of an error". `owes`: some collectives of the call were not made. The board may be null.
inline void leave_turn(Board* board, const std::string& error, bool owes) {
  if (board != nullptr) board->turns().raised(error, owes);
}

// RAII: records that the lane waits for this collective. The board may be null.
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
