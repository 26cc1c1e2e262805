#include "src/engine/step/window_agreement.h"

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/unit_order.h"

namespace penstock::engine {

// Format: AccumulationWindow::said(), then one character per unit ('1': its gradient is late).
std::string say_window(const AccumulationWindow& window, const Driver& driver) {
  std::string said = window.said();
  for (const bool late : driver.late()) said += late ? '1' : '0';
  return said;
}

std::string options_text(const std::vector<OptimizerConfig>& groups, const std::string& others) {
  std::string bytes = others;
  for (const OptimizerConfig& group : groups) {
    for (const double option :
         {group.lr, group.betas[0], group.betas[1], group.eps, group.weight_decay, group.momentum,
          group.dampening, group.lr_decay, static_cast<double>(group.nesterov),
          static_cast<double>(group.type)}) {
      bytes.append(reinterpret_cast<const char*>(&option), sizeof(option));
    }
  }
  const uint64_t hash = hash_text(bytes);
  return {reinterpret_cast<const char*>(&hash), sizeof(hash)};
}

bool hear_window(const std::vector<std::string>& all, AccumulationWindow& window, Driver& driver) {
  const auto backwards = static_cast<size_t>(window.accumulate());
  const auto ended = [&](const std::string& said) { return std::min(said.find('.'), backwards); };
  const size_t options = backwards + driver.late().size();  // index at which options_text() begins
  std::string anywhere = all.front().substr(0, options);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (ended(all[rank]) != ended(all.front())) {
      throw RuntimeFault(
          concat("[engine::step] ranks ended different numbers of backwards since "
                 "the last step: ",
                 ended(all.front()), " on rank 0, ", ended(all[rank]), " on rank ", rank));
    }
    if (all[rank].substr(options) != all.front().substr(options)) {
      throw RuntimeFault(
          concat("[engine::step] the optimizer's options (the learning rate or another option of a "
                 "parameter group) differ between rank 0 and rank ",
                 rank, ". Set the same options on every rank"));
    }
    for (size_t i = 0; i < options; ++i) anywhere[i] = std::max(anywhere[i], all[rank][i]);
  }
  const bool shorter = window.keep(anywhere.substr(0, backwards));
  std::vector<bool> late;
  for (size_t i = backwards; i < options; ++i) late.push_back(anywhere[i] == '1');
  const bool any_late = std::find(late.begin(), late.end(), true) != late.end();
  if (any_late) {
    driver.move_late(late, window.reduces() ? Section::kBackwardLast : Section::kBackward);
  }
  return !shorter && !any_late;
}

void hear_asked(std::vector<std::string>& all, int& wanted, int& agreed) {
  for (std::string& said : all) {
    agreed = std::max(agreed, said.back() - '0');
    said.pop_back();
  }
  wanted = 0;
}

bool forwards_meet(const exec::Executor& executor) {
  const Table& table = executor.table();
  const std::vector<Move> moves =
      hops(table.at(Role::kParam, Phase::kRest), table.at(Role::kParam, Phase::kForward));
  return std::any_of(moves.begin(), moves.end(), [&](const Move& move) {
    return move.is_collective() && executor.mesh().ranks_along(move.axes) > 1;
  });
}

std::string say_each(exec::Executor& executor, const std::string& label, bool mine) {
  std::string all;
  for (const std::string& one : executor.share(label, mine ? "1" : "0")) all += one;
  return all;
}

std::vector<std::string> share_text(exec::Executor& executor, const std::string& label,
                                    const std::string& mine) {
  return share_text(label, mine, [&](const std::string& name, const std::string& payload) {
    return executor.share(name, payload);
  });
}

std::string first_problem(exec::Executor& executor, const std::string& label,
                          const std::string& mine) {
  const std::vector<std::string> all = share_text(executor, label, mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return concat("rank ", rank, ": ", all[rank]);
  }
  return "";
}

void go_on(exec::Executor& executor, const AccumulationWindow& window, const Driver& driver,
           exec::Norm::Next next, const std::function<void()>& drop) {
  const Mesh& mesh = executor.mesh();
  if (mesh.world() == 1 || mesh.size(Axis::kPipeline) > 1 || !window.complete()) return;
  // Padded to the length of the text that is sent with the norm.
  const std::string said = say_window(window, driver) + std::string(kSaidBesides, '\0');
  try {
    exec::Norm::compare(
        executor.share(exec::Norm::kLabel, exec::Norm::going_on(executor.units(), next, said)));
  } catch (...) {
    drop();
    throw;
  }
}

std::string at_this_point(const char* did, const AccumulationWindow& window, int64_t steps) {
  return concat(did, " in step ", steps + 1, " after ", window.seen(), " of ", window.accumulate(),
                " backwards");
}

void agree_on_window(exec::Executor& executor, AccumulationWindow& window, Driver& driver) {
  // Ends the moves first, so that a timeout error names this exchange and not a gradient move.
  executor.gradients().finish();
  while (!hear_window(executor.share("read window", say_window(window, driver)), window, driver)) {
  }
}

}  // namespace penstock::engine
