#include "src/ckpt/inventory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/ckpt/damaged.h"
#include "src/mem/block_io.h"

namespace penstock::ckpt {

namespace {

struct Walker {
  exec::Executor& executor;
  const int rank;
  const std::vector<std::string>& moments;
  const bool lent;
  std::vector<Holding> found{};

  const Placement& whole() const { return executor.table().at(Role::kParam, Phase::kForward); }

  int64_t begin_of(const Placement& place, const exec::Flat& flat) const {
    const Mesh over = flat.placement.mesh(executor.mesh());
    return shard_index(place, over, rank) * flat.numel / num_shards(place, over);
  }

  // Adds the resting parameters of a flat without masters.
  void rest(int unit, exec::Flat& flat) {
    const Placement& place = flat.rest().place;
    found.push_back({unit, &flat, &flat.rest().one(), mem::Account::kParam, place, "param",
                     begin_of(place, flat), place == whole() || lent});
  }

  // Adds the masters (buffer 0) and the moments of one chunk. Users can edit parameters that rest
  // whole.
  void state(int unit, exec::Flat& flat, exec::ChunkState& chunk) {
    exec::Copy& copy = chunk.optim.front();
    for (size_t i = 0; i < copy.buffers.size(); ++i) {
      if (!copy.buffers[i].exists()) continue;
      Holding& one = found.emplace_back();
      one.unit = unit;
      one.flat = &flat;
      one.buffer = &copy.buffers[i];
      one.account = mem::Account::kOptim;
      one.place = copy.place;
      one.role = i == 0 ? "param" : moments.at(i - 1);
      one.first = begin_of(copy.place, flat) + chunk.begin;
      one.users = lent && i == 0;
      const bool edits = flat.rest().place == whole() && !executor.table().keeps_base();
      if (i == 0 && edits) {
        one.edits = &flat.rest().one();
        one.edits_first = begin_of(whole(), flat);
      }
    }
  }
};

}  // namespace

std::vector<Holding> holdings(exec::Executor& executor, int rank,
                              const std::vector<std::string>& moments, bool lent) {
  Walker walker{executor, rank, moments, lent};
  for (size_t u = 0; u < executor.units().size(); ++u) {
    for (exec::Flat& flat : executor.units()[u].flats) {
      const auto unit = static_cast<int>(u);
      if (!flat.trainable || !executor.table().has_master(flat.dtype)) walker.rest(unit, flat);
      for (exec::ChunkState& chunk : flat.chunks) walker.state(unit, flat, chunk);
    }
  }
  return std::move(walker.found);
}

std::pair<int64_t, int64_t> share_of(const Holding& holding, const Mesh& mesh, int rank) {
  const ModelPlacement& placement = holding.flat->placement;
  const Mesh over = placement.mesh(mesh);
  const int own = shard_index(holding.place, over, rank);
  const int stage = mesh.coordinate(rank, Axis::kPipeline);
  const std::vector<int>& stages = placement.on(Axis::kPipeline).holders;
  if (!stages.empty() && stages.front() != stage) return {0, 0};  // that stage writes it
  // Counts the ranks of the stage that hold the same values: the same shard of an equal flat.
  int64_t index = 0, count = 0;
  for (int other = 0; other < mesh.world(); ++other) {
    if (mesh.coordinate(other, Axis::kPipeline) != stage) continue;
    if (!placement.is_alike(mesh, rank, other)) continue;
    if (shard_index(holding.place, over, other) != own) continue;
    index += other < rank ? 1 : 0;
    ++count;
  }
  const Dtype dtype = holding.buffer->dtype;
  const int64_t in_block =
      mem::kBlockBytes / dtype_bytes(is_quantized(dtype) ? holding.flat->dtype : dtype);
  const int64_t blocks = (holding.numel() + in_block - 1) / in_block;
  const auto cut = [&](int64_t part) {
    return std::min(holding.numel(), blocks * part / count * in_block);
  };
  return {cut(index), cut(index + 1)};
}

namespace {

// Adds the pieces of a parameter that tensor ranks have cut. Each range of a row is contiguous in
// the full tensor, so it becomes one piece. `part`: elements of the flat.
void add_cut(const exec::Slot& slot, const Global& global, std::pair<int64_t, int64_t> part,
             std::vector<StatePiece>* found) {
  // The manifest must have the name even if this part is empty.
  if (slot.numel == 0) return found->push_back({global, 0, slot.offset});
  const auto dim = static_cast<size_t>(slot.cut.dim);
  int64_t inner = 1, outer = 1;
  for (size_t i = 0; i < slot.whole.size(); ++i) (i < dim ? outer : inner) *= slot.whole[i];
  inner = slot.whole[dim] == 0 ? 0 : inner / slot.whole[dim];
  int64_t at = slot.offset;
  for (int64_t row = 0; row < outer; ++row) {
    for (const auto& [first, end] : slot.ranges) {
      const int64_t numel = (end - first) * inner;
      const int64_t from = std::max(part.first, at), to = std::min(part.second, at + numel);
      if (from < to) {
        StatePiece piece{global, to - from, from};
        piece.global.begin += (row * slot.whole[dim] + first) * inner + (from - at);
        found->push_back(std::move(piece));
      }
      at += numel;
    }
  }
}

}  // namespace

std::vector<StatePiece> pieces(const Holding& holding, int64_t first, int64_t numel,
                               const GlobalOf& global_of) {
  std::vector<StatePiece> found;
  for (const exec::Slot& slot : holding.flat->slots) {
    const int64_t from = std::max(first, slot.offset);
    const int64_t to = std::min(first + numel, slot.offset + slot.numel);
    if (from >= to && slot.numel > 0) continue;
    if (slot.is_cut()) {
      add_cut(slot, global_of(holding.unit, slot), {from, to}, &found);
      continue;
    }
    StatePiece piece{global_of(holding.unit, slot), std::max<int64_t>(0, to - from), from};
    piece.global.begin += slot.numel > 0 ? from - slot.offset : 0;
    found.push_back(std::move(piece));
  }
  return found;
}

const char* file_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp32:
      return "F32";
    case Dtype::kBf16:
      return "BF16";
    default:
      return "F16";
  }
}

namespace {

const std::map<at::ScalarType, const char*>& scalar_names() {
  static const std::map<at::ScalarType, const char*> kNames = {
      {at::kDouble, "F64"}, {at::kFloat, "F32"}, {at::kHalf, "F16"},        {at::kBFloat16, "BF16"},
      {at::kLong, "I64"},   {at::kInt, "I32"},   {at::kShort, "I16"},       {at::kChar, "I8"},
      {at::kByte, "U8"},    {at::kBool, "BOOL"}, {at::kComplexFloat, "C64"}};
  return kNames;
}

}  // namespace

const char* file_dtype(at::ScalarType type) {
  const auto found = scalar_names().find(type);
  if (found != scalar_names().end()) return found->second;
  throw ConfigError(
      concat("[ckpt::save] a tensor of dtype ", at::toString(type), " cannot be saved"));
}

at::ScalarType scalar_type(const std::string& file_dtype) {
  for (const auto& [type, name] : scalar_names()) {
    if (name == file_dtype) return type;
  }
  throw Damaged(concat("[ckpt::load] torch has no dtype for the file dtype ", file_dtype));
}

}  // namespace penstock::ckpt
