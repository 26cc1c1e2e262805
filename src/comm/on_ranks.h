#pragma once
// For tests: ranks that are threads of this process.
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "penstock/group.h"

namespace penstock::comm {

// Runs `body(group)` on every rank. Returns what each rank threw ("" for nothing).
template <typename Body>
std::vector<std::string> on_ranks(int size, const Body& body,
                                  std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto groups = Group::threads(size, timeout);
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*groups[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
      groups[rank]->close();
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

}  // namespace penstock::comm
