#pragma once
// Damaged: thrown if a checkpoint differs from the data that its writer stored. Older checkpoints
// may still be good.
#include "penstock/error.h"

namespace penstock::ckpt {

class Damaged : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

}  // namespace penstock::ckpt
