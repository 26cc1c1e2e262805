#include "src/ckpt/manifest.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <set>
#include <utility>

#include "src/base/text.h"
#include "src/ckpt/checksum.h"
#include "src/ckpt/damaged.h"
#include "src/ckpt/folder.h"
#include "src/ckpt/safetensors.h"

namespace penstock::ckpt {

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostGranule = 1 << 24;
constexpr int kMaxRanks = 1 << 24;

// Returns whether the name stays inside the checkpoint's folder.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
         });
}

Json json_of(const Tensor& tensor) {
  Json slices = Json::array();
  for (const Slice& slice : tensor.slices) {
    slices.push_back({slice.begin, slice.end, slice.file, slice.offset});
  }
  Json json = {{"role", tensor.role}, {"name", tensor.name}};
  if (tensor.rank >= 0) json["rank"] = tensor.rank;
  json["shape"] = tensor.shape;
  json["dtype"] = tensor.dtype;
  json["slices"] = std::move(slices);
  return json;
}

File parse_file(const Json& value) {
  const JsonReader entry(value, "the manifest's entry of a file");
  File file;
  file.name = entry.text("name");
  if (!is_plain_name(file.name)) entry.fail(concat("\"", file.name, "\" is not a plain file name"));
  file.bytes = entry.whole("bytes", 0, kMost);
  file.table = entry.whole("table", 0, file.bytes);
  file.data = entry.whole("data", 0, file.table);
  file.granule = entry.whole("granule", 1, kMostGranule);
  file.checksum = entry.text("checksum");
  // Every granule has a checksum of eight bytes. The check divides because, with large sizes, a
  // product could overflow.
  const int64_t length = file.table - file.data;
  const int64_t pieces = length / file.granule + (length % file.granule == 0 ? 0 : 1);
  if (pieces > file.bytes || file.bytes - file.table != pieces * 8) {
    entry.fail(concat("\"", file.name, "\" does not have one checksum per granule"));
  }
  return file;
}

Tensor parse_tensor(const Json& value, const std::vector<File>& files, bool complete) {
  const JsonReader entry(value, "the manifest's entry of a tensor");
  Tensor tensor;
  tensor.role = entry.text("role");
  tensor.name = entry.text("name");
  if (value.contains("rank")) tensor.rank = static_cast<int>(entry.whole("rank", 0, kMaxRanks));
  for (const Json& size : entry.list("shape")) {
    tensor.shape.push_back(entry.number(size, 0, kMost));
  }
  tensor.dtype = entry.text("dtype");
  const int64_t numel = num_elements(tensor.shape), size = value_bytes(tensor.dtype);
  if (numel < 0 || size == 0 || numel > kMost / size) {
    entry.fail(concat("\"", tensor.key(), "\" has an invalid shape or dtype"));
  }
  for (const Json& one : entry.list("slices")) {
    if (!one.is_array() || one.size() != 4) entry.fail("a slice is not four numbers");
    Slice slice;
    slice.begin = entry.number(one[0], 0, numel);
    slice.end = entry.number(one[1], slice.begin, numel);
    slice.file = static_cast<int>(entry.number(one[2], 0, static_cast<int64_t>(files.size()) - 1));
    const File& file = files[slice.file];
    slice.offset = entry.number(one[3], file.data, file.table);
    if ((slice.end - slice.begin) * size > file.table - slice.offset) {
      entry.fail(concat("\"", tensor.key(), "\" has a slice that ends outside ", file.name));
    }
    tensor.slices.push_back(slice);
  }
  int64_t end = 0;
  for (const Slice& slice : tensor.slices) {
    if (complete ? slice.begin != end : slice.begin < end) {
      entry.fail(concat("\"", tensor.key(), "\" has a gap or an overlap at element ", end));
    }
    end = slice.end;
  }
  if (complete && end != numel) {
    entry.fail(concat("the slices of \"", tensor.key(), "\" end at element ", end, " of ", numel));
  }
  return tensor;
}

Manifest parse_body(const Json& json, bool complete) {
  const JsonReader top(json, "the manifest");
  Manifest manifest;
  manifest.world = static_cast<int>(top.whole("world", 1, kMaxRanks));
  manifest.about = top.object("about");
  manifest.state = top.object("state");
  manifest.front = top.object("front");
  for (const Json& rank : top.list("ranks")) manifest.ranks.push_back(rank);
  std::set<std::string> names;
  for (const Json& file : top.list("files")) {
    manifest.files.push_back(parse_file(file));
    if (!names.insert(manifest.files.back().name).second) top.fail("a file is listed twice");
  }
  for (const Json& tensor : top.list("tensors")) {
    manifest.tensors.push_back(parse_tensor(tensor, manifest.files, complete));
  }
  if (complete && static_cast<int>(manifest.ranks.size()) != manifest.world) {
    top.fail("\"ranks\" does not have one entry for each rank");
  }
  return manifest;
}

}  // namespace

std::string Tensor::key() const {
  const std::string whole = role + "/" + name;
  return rank < 0 ? whole : concat(whole, "@rank", rank);
}

int64_t Tensor::numel() const { return num_elements(shape); }

std::string Manifest::text() const {
  Json body = {
      {"world", world}, {"about", about}, {"state", state}, {"front", front}, {"ranks", ranks}};
  body["files"] = Json::array();
  for (const File& file : files) {
    body["files"].push_back({{"name", file.name},
                             {"bytes", file.bytes},
                             {"data", file.data},
                             {"table", file.table},
                             {"granule", file.granule},
                             {"checksum", file.checksum}});
  }
  body["tensors"] = Json::array();
  for (const Tensor& tensor : tensors) body["tensors"].push_back(json_of(tensor));
  // The first line has the version and a checksum of the following text, so a reader can check both
  // before it uses that text. Both lines together are one JSON object.
  const std::string rest = dump(body).substr(1) + "\n";
  return concat("{\"penstock_checkpoint\":", kFormatVersion, ",\"checksum\":\"",
                hex(checksum(rest.data(), static_cast<int64_t>(rest.size()))), "\",\n", rest);
}

// The version is checked first, because in other versions everything else may differ.
Manifest Manifest::parse(std::string_view text, bool complete) {
  const Json json = parse_json(text, "the manifest");
  const JsonReader top(json, "the manifest");
  const int64_t version = top.whole("penstock_checkpoint", 0, kMost);
  if (version != kFormatVersion) {
    throw Damaged(concat("[ckpt::manifest] format version ", version,
                         " is not supported; this Penstock reads version ", kFormatVersion));
  }
  const std::string_view rest = text.substr(std::min(text.find('\n'), text.size() - 1) + 1);
  if (hex(checksum(rest.data(), static_cast<int64_t>(rest.size()))) != top.text("checksum")) {
    top.fail("the checksum does not match: the file was changed or truncated");
  }
  Manifest manifest = parse_body(json, complete);
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    if (!manifest.by_key_.emplace(manifest.tensors[i].key(), i).second) {
      top.fail(concat("tensor \"", manifest.tensors[i].key(), "\" occurs twice"));
    }
  }
  return manifest;
}

Manifest Manifest::read(const std::string& path, std::string* text) {
  // The path may lead to a wrong file. The first byte shows this, so the whole file need not be
  // read.
  const bool begins = read_head(path, 1) == "{";
  const std::string all = begins ? read_text(path) : "";
  if (text != nullptr) *text = all;
  try {
    if (!begins) throw Damaged("[ckpt::manifest] the file does not begin like a manifest");
    return parse(all);
  } catch (const Damaged& damage) {
    throw Damaged(concat(damage.what(), ", in \"", path, "\""));
  }
}

const Tensor* Manifest::find(const std::string& key) const {
  // The index is made on the first use, for manifests that merge() or a caller has filled.
  if (by_key_.size() != tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i) by_key_.emplace(tensors[i].key(), i);
  }
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &tensors[found->second];
}

Manifest merge(const std::vector<Manifest>& parts) {
  Manifest whole;
  whole.world = static_cast<int>(parts.size());
  whole.about = parts.front().about;
  whole.state = parts.front().state;
  whole.front = parts.front().front;
  std::map<std::string, size_t> by_key;
  for (const Manifest& part : parts) {
    const int first_file = static_cast<int>(whole.files.size());
    whole.files.insert(whole.files.end(), part.files.begin(), part.files.end());
    whole.ranks.insert(whole.ranks.end(), part.ranks.begin(), part.ranks.end());
    for (const Tensor& tensor : part.tensors) {
      const auto [at, added] = by_key.emplace(tensor.key(), whole.tensors.size());
      if (added) {
        whole.tensors.push_back(tensor);
        whole.tensors.back().slices.clear();
      }
      Tensor& into = whole.tensors[at->second];
      if (into.shape != tensor.shape || into.dtype != tensor.dtype) {
        throw RuntimeFault(
            concat("[ckpt::save] the ranks differ in shape or dtype of \"", tensor.key(), "\""));
      }
      // Each part numbers its files from 0.
      for (Slice slice : tensor.slices) {
        slice.file += first_file;
        into.slices.push_back(slice);
      }
    }
  }
  // Every element of a tensor must come from exactly one rank (share_of() in inventory.h).
  for (Tensor& tensor : whole.tensors) {
    std::sort(tensor.slices.begin(), tensor.slices.end(),
              [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const Slice& slice : tensor.slices) {
      PENSTOCK_ASSERT(slice.begin == end,
                      concat(tensor.key(), " has a gap or an overlap at element ", end));
      end = slice.end;
    }
    PENSTOCK_ASSERT(end == tensor.numel(), concat(tensor.key(), " ends at element ", end));
  }
  return whole;
}

}  // namespace penstock::ckpt
