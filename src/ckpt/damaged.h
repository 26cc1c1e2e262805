#pragma once
// Damaged: a checkpoint is not what its writer left. Another one may do.
#include "penstock/error.h"

namespace penstock::ckpt {

class Damaged : public RuntimeFault {
 public:
  using RuntimeFault::RuntimeFault;
};

}  // namespace penstock::ckpt
