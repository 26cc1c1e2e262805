#include "src/engine/adopt.h"

#include <fnmatch.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp32:
      return at::kFloat;
    case Dtype::kBf16:
      return at::kBFloat16;
    case Dtype::kFp16:
      return at::kHalf;
  }
  throw Bug("[engine::scalar_type] unknown dtype");
}

Dtype compute_dtype(const Config& config, const ParamInfo& param) {
  const at::ScalarType own = param.param.scalar_type();
  if (own != at::kFloat && own != at::kBFloat16 && own != at::kHalf) {
    throw ConfigError(concat("[engine::compute_dtype] parameter \"", param.name, "\" has dtype ",
                             at::toString(own), "; float32, bfloat16 and float16 are supported"));
  }
  for (const auto& [pattern, dtype] : config.dtypes) {
    if (fnmatch(pattern.c_str(), param.name.c_str(), 0) == 0) return parse_dtype(dtype);
  }
  if (config.precision) return parse_dtype(*config.precision);
  if (own == at::kBFloat16) return Dtype::kBf16;
  return own == at::kHalf ? Dtype::kFp16 : Dtype::kFp32;
}

std::vector<exec::UnitState> lay_out(const ModelTree& tree, const std::vector<UnitSpec>& specs,
                                     const Config& config, int num_ranks) {
  std::vector<exec::UnitState> units;
  for (const UnitSpec& spec : specs) {
    exec::UnitState unit;
    unit.name = spec.module.empty() ? "the root" : spec.module;
    for (const int index : spec.params) {
      const ParamInfo& info = tree.params[index];
      const int named = info.whole >= 0 ? info.whole : index;
      const Dtype dtype = compute_dtype(config, tree.params[named]);
      const bool trainable = info.param.requires_grad();
      exec::Flat* flat = nullptr;
      for (exec::Flat& one : unit.flats) {
        if (one.dtype == dtype && one.trainable == trainable) flat = &one;
      }
      if (flat == nullptr) flat = &unit.flats.emplace_back(dtype, trainable);
      exec::Slot slot;
      slot.name = info.name;
      slot.param = info.param;
      slot.index = named;
      slot.group = info.group;
      flat->add(slot, unit.name);
    }
    for (exec::Flat& flat : unit.flats) flat.seal(num_ranks);
    units.push_back(std::move(unit));
  }
  return units;
}

ModelDesc describe(const std::vector<exec::UnitState>& units) {
  ModelDesc model;
  for (const exec::UnitState& unit : units) {
    UnitDesc desc{unit.name, {}, TensorSplit::kNone};
    for (const exec::Flat& flat : unit.flats) {
      desc.flats.push_back({flat.numel, flat.dtype, flat.trainable});
    }
    model.units.push_back(desc);
  }
  assume_order(model, true);
  return model;
}

std::string fingerprint(const std::vector<exec::UnitState>& units) {
  std::string text;
  for (const exec::UnitState& unit : units) {
    for (const exec::Flat& flat : unit.flats) {
      for (const exec::Slot& slot : flat.slots) {
        text += concat("parameter \"", slot.name, "\" ", slot.param.sizes(), " ",
                       dtype_name(flat.dtype), flat.trainable ? "" : " frozen", " in unit ",
                       unit.name, "\n");
      }
    }
  }
  return text;
}

void own_storage(const at::Tensor& param, Dtype dtype) {
  const auto options = param.options().dtype(scalar_type(dtype)).requires_grad(false);
  const auto bytes = param.numel() * dtype_bytes(dtype);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::DataPtr(nullptr, param.device()),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor window = at::empty({0}, options);
  window.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  window.unsafeGetTensorImpl()->set_sizes_contiguous(param.sizes());
  param.mutable_grad().reset();
  param.set_data(window);
}

}  // namespace penstock::engine
