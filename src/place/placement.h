#pragma once
// Placement: the layout, tier and dtype of a copy of a unit's role. Only hops() decides how data
// moves from one placement to another. Plain values, usable from any thread.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/place/mesh.h"
#include "src/place/wire.h"

namespace penstock {

enum class Layout : uint8_t { kReplicated, kSharded, kPartial };  // R, S, P
enum class Tier : uint8_t { kDevice, kHost, kDisk };
// [Note: Quantized parameters] The last two dtypes are quantized: blocks of small integers, each
// block with one fp32 scale. Only frozen parameters at rest have them. They take the encoded form
// of a wire ([Note: Wires]), and each shard is encoded by itself. A unit computes with the values
// decoded and rounded to its own dtype, so a forward rounds nothing that `rest` did not round.
enum class Dtype : uint8_t { kFp32, kBf16, kFp16, kInt8, kInt4 };

int64_t dtype_bytes(Dtype dtype);  // of one value; not for quantized dtypes
bool is_quantized(Dtype dtype);
Wire code_of(Dtype dtype);  // of a quantized dtype
// Returns the bytes of a buffer with `numel` values. For quantized values, a multiple of 512.
int64_t buffer_bytes(Dtype dtype, int64_t numel);
const char* dtype_name(Dtype dtype);       // "fp32" "bf16" "fp16" "int8/128" "int4/64"
const char* tier_name(Tier tier);          // "device" "host" "disk"
Dtype parse_dtype(std::string_view text);  // throws ConfigError
Tier parse_tier(std::string_view text);    // throws ConfigError

struct Placement {
  std::array<Layout, kNumAxes> layout{};  // R on every axis
  Tier tier = Tier::kDevice;
  Dtype dtype = Dtype::kFp32;

  Layout on(Axis axis) const { return layout[static_cast<size_t>(axis)]; }
  Layout& on(Axis axis) { return layout[static_cast<size_t>(axis)]; }
  bool sharded() const;  // on any axis
  bool partial() const;  // on any axis
  // "SR@host:bf16"; "SR" = S over node, R over local. If another axis is not R, it follows with its
  // name: "SS,tensor=P@device:bf16".
  std::string text() const;
  static Placement parse(std::string_view text);  // throws ConfigError
  bool operator==(const Placement&) const = default;
};

// Only layers make the last two kinds, and hops() never returns them. `kAllToAll`: each rank sends
// a different part to each peer. `kShift`: each rank sends to the next rank of a ring.
enum class MoveKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kSlice,
  kCopy,
  kCast,
  kAllToAll,
  kShift
};
const char* move_kind_name(MoveKind kind);

// One hop. Only the fields that belong to its kind are meaningful.
struct Move {
  MoveKind kind{};
  std::vector<Axis> axes{};                       // collectives and slice, in nesting order
  Tier from = Tier::kDevice, to = Tier::kDevice;  // copy
  Dtype dtype = Dtype::kFp32;                     // cast
  Wire wire{};                                    // collectives
  // "all_gather(data)" (data = node and local together), "all_gather(local)",
  // "all_reduce(data,tensor)", "all_gather(node:int8/128)", "copy(device,host)", "cast(bf16)".
  std::string text() const;
  bool is_collective() const;
  bool operator==(const Move&) const = default;
};
Move parse_move(std::string_view text);  // throws ConfigError

// Both return shards of a copy with this placement: their number, and the index of the shard that
// `rank` owns. Shards are numbered in the nesting order of the sharded axes.
int num_shards(const Placement& place, const Mesh& mesh);
int shard_index(const Placement& place, const Mesh& mesh, int rank);

// Sets axes of size one to R, with one exception: if only one of the axes `node` and `local` has
// size one, it takes the layout of the other. So the moves of `zero3` are over "data", with one
// node or with several.
Placement normalize(Placement place, const Mesh& mesh);

// Returns the moves that turn a copy at `from` into a copy at `to`; empty if the placements are
// equal. Collectives run on the device tier. Casts to a narrower dtype come first, and casts to a
// wider dtype come last. Equal collectives on several axes are joined if they have the same wire.
// Shards stay contiguous: to gather or slice an outer axis while an inner axis is sharded, the
// inner axis is gathered first and sliced again afterwards. Throws ConfigError if an axis changes
// from R or S to P, since a sum cannot be undone.
std::vector<Move> hops(const Placement& from, const Placement& to, const Wires& wires = {});

// Returns the placement after one move. Throws ConfigError if the move cannot start from `place`.
Placement apply(const Placement& place, const Move& move);
bool applies(const Placement& place, const Move& move);

}  // namespace penstock
