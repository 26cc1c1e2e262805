#pragma once
// Damaged: thrown when a checkpoint differs from what its writer left. Another checkpoint may still
// be good.
#include "penstock/error.h"

namespace penstock::ckpt {

class Damaged : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

}  // namespace penstock::ckpt
