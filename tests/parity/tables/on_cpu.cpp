#include "tests/parity/tables/training.h"

namespace penstock::tables {

c10::Device place_of(int /*rank*/) { return {c10::DeviceType::CPU}; }

}  // namespace penstock::tables
