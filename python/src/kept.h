#pragma once
// [Note: Forked processes] A process that fork() made, such as a worker of a DataLoader, has copies
// of the engines of its parent, but not their threads. To destroy a copy would wait for these
// threads, and would speak to other ranks in the parent's name. So objects with threads or
// connections are destroyed only by the process that made them.
#include <unistd.h>

#include <memory>
#include <utility>

namespace penstock::python {

template <typename T>
struct DeletedByItsProcess {
  const pid_t made_by = getpid();

  void operator()(T* object) const {
    if (getpid() == made_by) delete object;
  }
};

template <typename T>
using Kept = std::unique_ptr<T, DeletedByItsProcess<T>>;

// The same for an object that is shared already.
template <typename T>
std::shared_ptr<T> kept(std::shared_ptr<T> object) {
  if (object == nullptr) return nullptr;
  T* const raw = object.get();
  const DeletedByItsProcess<std::shared_ptr<T>> end;
  auto* const owner = new std::shared_ptr<T>(std::move(object));
  return std::shared_ptr<T>(raw, [owner, end](T*) { end(owner); });
}

}  // namespace penstock::python
