#pragma once
// The wire codec for values on a device. It runs torch's operations on this thread's stream, and
// produces the same bytes as the host's kernels.
#include "src/device/wire_codec.h"

namespace penstock::device {

// These functions implement encode() and decode_sum() (wire_codec.h) for device memory.
void encode_on_device(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
                      const Residual& residual);
void sum_pieces_on_device(const Sum& sum, const Wire& wire);

}  // namespace penstock::device
