#pragma once
// Keeps objects alive until the process ends, because a hung disk may still use them.
#include <atomic>
#include <utility>

namespace penstock::mem {

// Callable from any thread. The value stays reachable, so leak checkers do not report it.
template <class T>
void keep_for_good(T value) {
  struct Node {
    T value;
    Node* next;
  };
  static std::atomic<Node*> last{nullptr};
  auto* node = new Node{std::move(value), nullptr};
  node->next = last.exchange(node);
}

}  // namespace penstock::mem
