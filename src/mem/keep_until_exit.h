#pragma once
// Keeps objects that a hanging disk may still use until the process ends, without destroying them.
#include <atomic>
#include <utility>

namespace penstock::mem {

// Any thread. The value stays reachable, so leak checkers do not report it.
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
