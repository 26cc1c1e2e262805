#pragma once
// What a disk that hangs may still use is kept until the process ends, and not destroyed then.
#include <atomic>
#include <utility>

namespace penstock::mem {

// Any thread. Leak checkers find the value.
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
