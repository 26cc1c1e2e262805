#pragma once
// The wire codec for values on a device, by torch's operations on this thread's stream. The bytes
// are those of the host's kernels.
#include "src/device/wire_codec.h"

namespace penstock::device {

// encode() and decode_sum() of wire_codec.h.
void encode_on_device(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
                      const Residual& residual);
void sum_pieces_on_device(const Sum& sum, const Wire& wire);

}  // namespace penstock::device
